"""What one rank of several writes, in a file of its own instead of on the terminal that all ranks share."""

import contextlib
import os
import socket
import sys
import tempfile
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, TextIO

from automodel.observe.metrics import utc_timestamp

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["RankLog", "flush_streams"]

_STREAMS = (1, 2)


class RankLog:
    """A context in which everything that this process writes to its standard streams goes to a file.

    That is so for descriptors, so that it holds for libraries and for child processes too. Until `open` names the file,
    what is written waits in a temporary one; what no file was opened for is lost. So is what cannot be written, on a
    full disk for one: printing never fails.

    Attributes:
        terminal: The standard error stream that the process was started with.
        path: The file; None before `open`.
    """

    def __init__(self) -> None:
        """Prepare; the context does the rest."""
        self.path: Path | None = None
        self._kept: dict[int, int] = {}
        self._waiting: IO[bytes] | None = None
        self._streams = (sys.stdout, sys.stderr)
        self.terminal: TextIO = sys.stderr

    def __enter__(self) -> Self:
        self._waiting = _make_temporary_file()
        flush_streams()
        for stream in _STREAMS:
            self._kept[stream] = os.dup(stream)
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        self._point_to(self._waiting)
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = _open_lossy(1), _open_lossy(2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        flush_streams()
        sys.stdout, sys.stderr = self._streams
        # Handlers of the log write to these; what they could not write must not come out on the terminal.
        flush_streams()
        for stream, kept in self._kept.items():
            os.dup2(kept, stream)
            os.close(kept)
        self._kept.clear()
        with contextlib.suppress(OSError):
            self.terminal.close()
        self.terminal = sys.stderr
        if self._waiting is not None:
            self._waiting.close()

    def open(self, path: Path, *, rank: int, world_size: int) -> None:
        """Append what was written so far, and from now on, to the file at `path`.

        Raises:
            OSError: the file cannot be made or written; what is written later waits as before.
        """
        assert self._waiting is not None, "the context has not been entered"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            header = (
                f"--- {utc_timestamp()} rank {rank} of {world_size}, process {os.getpid()} on {socket.gethostname()}\n"
            )
            file.write(header.encode())
            file.flush()
            flush_streams()
            self._waiting.seek(0)
            file.write(self._waiting.read())
            file.flush()
            self._point_to(file)
        self.path = path

    def write(self, text: str) -> None:
        """Write a text that should not be lost unnoticed.

        Raises:
            OSError: it cannot be written.
        """
        flush_streams()
        left = text.encode("utf-8", "backslashreplace")
        while left:
            left = left[os.write(2, left) :]

    def _point_to(self, file: IO[bytes]) -> None:
        for stream in _STREAMS:
            os.dup2(file.fileno(), stream)


def flush_streams() -> None:
    """Flush the standard streams; one that fails (a full disk, a closed terminal) then goes to the null device."""
    for number, stream in zip(_STREAMS, (sys.stdout, sys.stderr), strict=True):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
            with contextlib.suppress(OSError):
                stream.flush()


class _LossyFile(FileIO):
    """A file whose writes count as done when they fail."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _open_lossy(descriptor: int) -> TextIO:
    raw = _LossyFile(descriptor, "wb", closefd=False)
    return TextIOWrapper(BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _make_temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError:
        # No folder for temporary files has room: what would wait there is lost.
        return Path(os.devnull).open("r+b")
