"""One process at a time in a folder."""

import contextlib
import fcntl
import logging
import os
from pathlib import Path

__all__ = ["FolderBusyError", "FolderLock"]

logger = logging.getLogger(__name__)


class FolderBusyError(RuntimeError):
    """Another process holds the folder."""


class FolderLock:
    """An advisory lock on a folder, held until `close` or until the process ends, however it ends.

    It locks the folder itself and leaves no file behind. A filesystem without such locks (some network ones) gives
    none, which the log tells.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder where it does not exist, and lock it.

        Raises:
            OSError: the folder cannot be made or opened, or not written.
            FolderBusyError: another process holds it.
        """
        self._path = path
        self._is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"the folder {path} cannot be written")
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_new = False
            self.close()
            raise FolderBusyError(f"another process is working in {path}") from None
        except OSError as error:
            logger.info("%s cannot be locked against other processes: %s", path, error)

    def close(self) -> None:
        """Let other processes in, and remove a folder that this lock made if it is still empty.

        Harmless when it was done before.
        """
        if self._descriptor is not None:
            if self._is_new:
                with contextlib.suppress(OSError):
                    self._path.rmdir()
            os.close(self._descriptor)
            self._descriptor = None
