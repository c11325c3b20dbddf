"""The folder that a run leaves behind: where each file is, how it is named, and who may write in it."""

import contextlib
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from automodel.caches.folder_lock import FolderBusyError, FolderLock
from automodel.observe.atomic_file import replace_file

__all__ = ["RunFolder"]

CONFIG_HEADER = "# automodel run configuration, version 1; secrets are placeholders or redacted\n"


class RunFolder:
    """One run's folder; it is locked against a second run until `close`, or until this process ends.

    Of several ranks of a run, rank zero makes the folder and locks it, and the others `join` it.

    Attributes:
        path: The folder.
        is_continued: Whether an earlier run left its configuration in it.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder, or open the one that is there.

        Raises:
            OSError: it cannot be made or written.
            FolderBusyError: another process is training in it.
        """
        self._take(path, lock=FolderLock(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def make_new(cls, parent: Path, stem: str) -> Self:
        """Make a folder that did not exist: `<stem>_<date>-<time>`, with a number where that is taken."""
        name = f"{stem}_{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            number += 1
            if path.exists():
                continue
            with contextlib.suppress(FolderBusyError):
                folder = cls(path)
                if not folder.is_continued:
                    return folder
                folder.close()

    @classmethod
    def join(cls, path: Path) -> Self:
        """Open the folder that another rank of this run has made and locked.

        Raises:
            FileNotFoundError: this machine does not see it.
        """
        if not path.is_dir():
            raise FileNotFoundError(
                f"the run folder {path}, which rank 0 made, is not there on {socket.gethostname()}; all ranks need it"
            )
        folder = cls.__new__(cls)
        folder._take(path, lock=None)
        return folder

    def _take(self, path: Path, *, lock: FolderLock | None) -> None:
        self._lock = lock
        self.path = path
        self.is_continued = self.config_file.exists()

    @property
    def config_file(self) -> Path:
        """The redacted configuration."""
        return self.path / "config.yaml"

    @property
    def training_file(self) -> Path:
        """One JSON row per step."""
        return self.path / "training.jsonl"

    @property
    def validation_file(self) -> Path:
        """One JSON row per validation."""
        return self.path / "validation.jsonl"

    @property
    def report_file(self) -> Path:
        """The page with the curves."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, unless the recipe puts them elsewhere."""
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        """What a rank other than zero writes to its standard streams."""
        return self.path / "logs" / f"rank_{rank}.log"

    def write_config(self, text: str) -> None:
        """Save the redacted configuration."""
        replace_file(self.config_file, (CONFIG_HEADER + text).encode())

    def close(self) -> None:
        """Let another process use the folder; a new one in which nothing was left is removed."""
        if self._lock is not None:
            self._lock.close()
