"""The failure of one rank as all ranks of a job see it, through the store where they meet.

One rank's failure counts: the first that is written. The others follow from it, so that they need no showing.
"""

import json
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Failure", "FailureBoard", "FailureWatch", "PeerFailureError"]

_PERIOD = 0.5  # seconds between two looks for a failure


class PeerFailureError(RuntimeError):
    """This rank ends because another one failed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Which rank failed first, and how; None for the store, which vanished with whoever kept it."""

    rank: int | None
    text: str

    @property
    def as_error(self) -> PeerFailureError:
        """The error of a rank that ends because of this failure."""
        who = "the job" if self.rank is None else f"rank {self.rank}"
        return PeerFailureError(f"{who} failed: {self.text}")


class FailureBoard:
    """The place in a store where ranks say that they failed, and that they have left."""

    def __init__(self, store: dist.Store) -> None:
        """Take a store whose connection nobody blocks by waiting on it."""
        self._store = store

    def announce(self, rank: int, text: str) -> bool:
        """Say that `rank` failed; returns whether it is the first that says so."""
        mine = json.dumps({"rank": rank, "text": text})
        stored: bytes = self._store.compare_set("failure", "", mine)
        return stored.decode() == mine

    def read(self) -> Failure | None:
        """Return the first failure, if there was one."""
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def count(self, event: str) -> int:
        """Add this rank to those that reached `event`; returns their number."""
        return int(self._store.add(event, 1))

    def counted(self, event: str) -> int:
        """Return how many ranks reached `event`."""
        return int(self._store.add(event, 0))


class FailureWatch:
    """A thread that looks for failures of other ranks, and for the end of the process that keeps the store."""

    def __init__(
        self, board: FailureBoard, lifeline: socket.socket, *, then: "Callable[[FailureWatch, Failure], None]"
    ) -> None:
        """Start it.

        Args:
            board: Where failures are announced.
            lifeline: A connection to the keeper of the store on which nothing is ever sent; it ends with the keeper.
            then: Called in the thread with this watch and the first failure; the thread ends when it returns.
        """
        self._board = board
        self._lifeline = lifeline
        self._then = then
        self._stop = threading.Event()
        self._lifeline.settimeout(_PERIOD)
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; harmless when it was done before, and in the thread itself."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stops_within(self, seconds: float) -> bool:
        """Wait for `stop`; returns whether it was called in time."""
        return self._stop.wait(seconds)

    def _watch(self) -> None:
        while not self._stop.is_set():
            failure = self._look()
            if failure is not None and not self._stop.is_set():
                self._then(self, failure)
                return

    def _look(self) -> Failure | None:
        """Wait for the end of the keeper for a period, then read the board."""
        gone = Failure(rank=None, text="the process that keeps the store of the ranks has ended")
        try:
            if not self._lifeline.recv(1):
                return gone
        except TimeoutError:
            pass
        except OSError:
            return gone
        try:
            return self._board.read()
        except RuntimeError:
            return gone
