"""A pipe that tells a child process when its parent is gone, however the parent ended."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lifeline", "watch_lifeline"]


class Lifeline:
    """The parent's end: open for as long as the parent lives, or until `close`.

    Give `child_fd` to the child with `pass_fds`; the child hands it to `watch_lifeline`.
    """

    def __init__(self) -> None:
        self.child_fd, self._parent_fd = os.pipe()

    def close(self) -> None:
        """Lets go of both ends; every child that watches ends itself."""
        for fd in (self.child_fd, self._parent_fd):
            if fd >= 0:
                os.close(fd)
        self.child_fd = self._parent_fd = -1


def watch_lifeline(fd: int, then: Callable[[], object]) -> None:
    """Calls `then` in a thread of its own as soon as the parent's end of `fd` is closed; returns at once."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        then()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
