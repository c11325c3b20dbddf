"""What one rank of several writes, in a file of its own instead of on the terminal that all ranks share."""

import os
import socket
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TextIO

from automodel.observe.metrics import utc_timestamp

__all__ = ["RankLog"]

_STREAMS = (1, 2)


class RankLog:
    """A context in which everything that this process writes to its standard streams goes to a file.

    That is so for descriptors, so that it holds for libraries and for child processes too. Until `open` names the file,
    what is written waits in a temporary one; what no file was opened for is lost.

    Attributes:
        terminal: The standard error stream that the process was started with.
        path: The file; None before `open`.
    """

    def __init__(self) -> None:
        """Prepare; the context does the rest."""
        self.path: Path | None = None
        self._kept: dict[int, int] = {}
        self._waiting: BinaryIO | None = None
        self.terminal: TextIO = sys.stderr

    def __enter__(self) -> Self:
        self._waiting = tempfile.TemporaryFile()
        _flush()
        for stream in _STREAMS:
            self._kept[stream] = os.dup(stream)
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        self._point_to(self._waiting)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _flush()
        for stream, kept in self._kept.items():
            os.dup2(kept, stream)
            os.close(kept)
        self._kept.clear()
        self.terminal.close()
        self.terminal = sys.stderr
        if self._waiting is not None:
            self._waiting.close()

    def open(self, path: Path, *, rank: int, world_size: int) -> None:
        """Append what was written so far, and from now on, to the file at `path`.

        Raises:
            OSError: the file cannot be made or written.
        """
        assert self._waiting is not None, "the context has not been entered"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            header = (
                f"--- {utc_timestamp()} rank {rank} of {world_size}, process {os.getpid()} on {socket.gethostname()}\n"
            )
            file.write(header.encode())
            file.flush()
            _flush()
            self._waiting.seek(0)
            file.write(self._waiting.read())
            file.flush()
            self._point_to(file)
        self.path = path

    def _point_to(self, file: BinaryIO) -> None:
        for stream in _STREAMS:
            os.dup2(file.fileno(), stream)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
