"""A process's membership in a job of several: it joins, meets the others, fails and ends together with them.

The ranks meet in a TCP store, which torchrun's agent keeps, or else rank zero. A process that is alone is a member of
a job too, whose operations cost nothing.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from automodel.distributed.backends import choose_backend
from automodel.distributed.env import LaunchEnvironment
from automodel.distributed.failures import Failure, FailureBoard, FailureWatch, PeerFailureError
from automodel.distributed.rank_group import PeerError, RankGroup

__all__ = ["JoinError", "Membership", "open_board"]

logger = logging.getLogger(__name__)

END_GRACE = 3.0  # seconds in which a rank may end by itself after another one failed
OWN_GRACE = 10.0  # seconds for the rank that failed itself
CAUSE_GRACE = 1.5  # seconds in which the rank whose failure caused this one's may say so first
LINGER = 4.0  # seconds for which the first rank that failed waits for the others to notice
STORE_TIMEOUT = timedelta(seconds=30)  # for one answer of the store
_MISSING_SHOWN = 8


class JoinError(RuntimeError):
    """The ranks of a job did not find each other in time."""


class Membership:
    """This process among the ranks of its job; a context manager that announces the error that leaves it.

    Attributes:
        launch: What the launcher said.
        failure: The failure of another rank, or of the store, once it has been noticed.
    """

    def __init__(self, launch: LaunchEnvironment, *, meeting: "_Meeting | None", borrowed: bool = False) -> None:
        """Take what `join` made."""
        self.launch = launch
        self.failure: Failure | None = None
        self._meeting = meeting
        self._borrowed = borrowed
        self._owns_group = False
        self._is_first_failure: bool | None = None
        self._is_closing = False
        self._on_peer_failure: Callable[[Failure], None] | None = None
        self._has_noticed = threading.Event()
        self._noticing = threading.Lock()
        self._watch: FailureWatch | None = None
        if meeting is not None:
            self._watch = FailureWatch(meeting.board, meeting.lifeline, then=self._meet_failure)

    @classmethod
    def join(cls, launch: LaunchEnvironment, *, timeout_seconds: float) -> Self:
        """Connect to the store where the ranks meet, without waiting for them.

        A default process group that exists already is used as it is.

        Args:
            launch: What the launcher says.
            timeout_seconds: How long the store, and later each rank, is waited for.

        Raises:
            ValueError: the launcher does not say where the ranks meet.
            JoinError: the store cannot be reached.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(launch, meeting=None, borrowed=True)
        if launch.world_size == 1:
            return cls(launch, meeting=None)
        return cls(launch, meeting=_Meeting(launch, timeout_seconds=timeout_seconds))

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank() if self._borrowed else self.launch.rank

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return dist.get_world_size() if self._borrowed else self.launch.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank zero, which speaks for the job."""
        return self.rank == 0

    @property
    def has_open_group(self) -> bool:
        """Whether the process group that this membership made still exists."""
        return self._owns_group and dist.is_initialized()

    def must_tell(self, failure: Failure) -> bool:
        """Whether this rank has to show a failure elsewhere, because nobody else can.

        Only the end of the store's keeper is one: the lowest rank that remains shows it.
        """
        return failure.rank is None and self.rank == (0 if self.launch.uses_agent_store else 1)

    def on_peer_failure(self, tell: Callable[[Failure], None]) -> None:
        """Have `tell` called, in a thread, when a failure elsewhere is noticed; this process ends soon after it."""
        with self._noticing:
            self._on_peer_failure = tell
            failure = self.failure
        if failure is not None:
            tell(failure)

    def share(self, name: str, value: str) -> None:
        """Give the other ranks a value that they `receive`; rank zero calls it, once for each name."""
        if self._borrowed:
            RankGroup(dist.group.WORLD).broadcast(value)
        elif self._meeting is not None:
            self._meeting.store.set(f"shared/{name}", value)

    def receive(self, name: str) -> str:
        """Wait for the value that rank zero shares; not for rank zero itself.

        Raises:
            PeerFailureError: another rank failed.
            JoinError: rank zero shared nothing in time.
        """
        if self._borrowed:
            return RankGroup(dist.group.WORLD).broadcast("")
        assert self._meeting is not None, "a process alone receives nothing"
        key = f"shared/{name}"
        if not self._wait(lambda: self._store.check([key]), self._meeting.timeout):
            raise JoinError(
                f"rank 0 did not get as far as the others within {_minutes(self._meeting.timeout)} "
                f"(dist_env.timeout_minutes); they meet at {self._place}"
            )
        return self._store.get(key).decode()

    def start_group(self, *, backend: str | None, device: torch.device, timeout_minutes: float) -> RankGroup:
        """Wait for every rank, then make the default process group of the job.

        Args:
            backend: `dist_env.backend`; null is chosen by the device.
            device: This rank's device, which becomes the current one.
            timeout_minutes: How long a rank is waited for, and a collective may take.

        Raises:
            ValueError: there is no such backend.
            JoinError: ranks are missing; the message names them.
            PeerFailureError: another rank failed.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self._borrowed:
            return RankGroup(dist.group.WORLD)
        if self._meeting is None:
            return RankGroup()
        chosen = choose_backend(backend, device)
        timeout = timedelta(minutes=timeout_minutes)
        self._wait_for_all(timeout.total_seconds())
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" and "nccl" in chosen else None,
        )
        self._owns_group = True
        return RankGroup(dist.group.WORLD)

    def announce_failure(self, error: BaseException) -> bool:
        """Tell the other ranks that this one failed.

        Returns:
            Whether this rank is the first that failed, so that its error is the one to show.
        """
        if self._is_first_failure is None:
            self._is_first_failure = self._announce(error)
        return self._is_first_failure

    def close(self) -> None:
        """End the membership together with the other ranks; harmless when it was done before.

        Raises:
            PeerFailureError: another rank failed before it came to its end.
        """
        meeting = self._meeting
        if meeting is None or self._is_closing:
            return
        self._is_closing = True
        try:
            if self._is_first_failure is None:
                self._end_together(meeting)
            else:
                self._leave_after_failure(meeting)
        finally:
            self._stop_watch()
            meeting.lifeline.close()
            # The connections, and the store itself where this process keeps it, end with their last users.
            self._meeting = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.announce_failure(error)
        self.close()

    @property
    def _board(self) -> FailureBoard:
        assert self._meeting is not None
        return self._meeting.board

    @property
    def _place(self) -> str:
        assert self._meeting is not None
        return self._meeting.place

    @property
    def _store(self) -> dist.Store:
        assert self._meeting is not None
        return self._meeting.store

    def _announce(self, error: BaseException) -> bool:
        if self._meeting is None:
            return True
        if isinstance(error, PeerFailureError):
            return False
        if _is_consequence(error):
            # The rank where it began needs a moment to say so.
            with contextlib.suppress(PeerFailureError):
                self._wait(lambda: False, CAUSE_GRACE)
        try:
            return self.failure is None and self._meeting.board.announce(self.rank, f"{type(error).__name__}: {error}")
        except RuntimeError:
            return False

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until `ready`, or for so many seconds; returns whether it came true."""
        deadline = time.monotonic() + seconds
        pause = 0.01
        while not self._asked(ready):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        return True

    def _asked(self, ready: Callable[[], bool]) -> bool:
        failure = self.failure
        if failure is None:
            try:
                return ready()
            except RuntimeError as error:
                # The store is gone; the watch notices that too, but later.
                failure = Failure(rank=None, text=f"the store of the ranks does not answer ({type(error).__name__})")
        raise failure.as_error

    def _wait_for_all(self, seconds: float) -> None:
        names = [f"arrived/{rank}" for rank in range(self.size)]
        self._store.set(names[self.rank], "")
        # One key for the others to look at, so that a large job does not ask for all keys on all ranks.
        if self._wait(lambda: self._store.check(names if self.is_main else ["complete"]), seconds):
            self._store.set("complete", "")
            return
        missing = [str(rank) for rank, name in enumerate(names) if not self._store.check([name])]
        if missing:
            named = ", ".join(missing[:_MISSING_SHOWN]) + (", ..." if len(missing) > _MISSING_SHOWN else "")
            raise JoinError(
                f"{len(missing)} of {self.size} ranks did not join within {_minutes(seconds)} "
                f"(dist_env.timeout_minutes): rank {named}; they meet at {self._place}"
            )

    def _meet_failure(self, watch: FailureWatch, failure: Failure) -> None:
        """Note the first failure of the job, in the thread of the watch, and end this process unless it ends itself."""
        is_own = failure.rank == self.rank
        with self._noticing:
            self.failure = None if is_own else failure
            tell = self._on_peer_failure
        if tell is not None and not is_own:
            tell(failure)
        self._note_failure(is_store_gone=failure.rank is None)
        if not watch.stops_within(OWN_GRACE if is_own else END_GRACE):
            # A collective on a GPU cannot be interrupted, and the interpreter would wait for it.
            os._exit(1)

    def _note_failure(self, *, is_store_gone: bool = False) -> None:
        if not is_store_gone:
            with contextlib.suppress(RuntimeError):
                self._board.count("noticed")
        self._has_noticed.set()

    def _end_together(self, meeting: "_Meeting") -> None:
        """Wait for the others to come to their end: while they exchange messages, no rank may close its connections."""
        meeting.board.count("finished")
        if not self._wait(lambda: meeting.board.counted("finished") == self.size, meeting.timeout):
            logger.warning("other ranks did not end within %s", _minutes(meeting.timeout))
        self._stop_watch()
        if self.has_open_group:
            dist.destroy_process_group()
        with contextlib.suppress(RuntimeError):
            meeting.board.count("departed")
        if meeting.keeps_store:
            meeting.wait_for("departed", self.size, seconds=meeting.timeout)

    def _leave_after_failure(self, meeting: "_Meeting") -> None:
        """Stay until the other ranks know why, then leave the process group as it is.

        Its end might wait for collectives that never end. The end of the process is what wakes the ranks that wait for
        this one, and what makes the launcher look for a culprit.
        """
        self._has_noticed.wait(LINGER)
        self._stop_watch()
        if not self._has_noticed.is_set():
            self._note_failure()
        if self._is_first_failure or meeting.keeps_store:
            meeting.wait_for("noticed", self.size, seconds=LINGER)

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


class _Meeting:
    """The connections to the store where the ranks meet.

    Attributes:
        store: For this process's main thread and its process groups, which may block it.
        board: On a connection of its own, which nobody blocks.
        lifeline: A connection on which nothing is sent; it ends with the process that keeps the store.
        keeps_store: Whether that is this process.
        timeout: Seconds for which ranks are waited for.
        place: Where they meet, and who says so.
    """

    def __init__(self, launch: LaunchEnvironment, *, timeout_seconds: float) -> None:
        host, port = launch.master_addr, launch.master_port
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
            if not value:
                raise ValueError(f"environment variable {name} is not set: the {launch.world_size} ranks meet there")
        assert host is not None
        assert port is not None
        self.timeout = timeout_seconds
        self.place = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        self.keeps_store = launch.rank == 0 and not launch.uses_agent_store
        keeper = _keep_store(port) if self.keeps_store else None
        if keeper is not None:
            host = "localhost"
        self.lifeline = _connect(host, port, seconds=timeout_seconds)
        main = keeper or _open_store(host, port)
        self.store: dist.Store = dist.PrefixStore(_prefix(launch.restart_count), main)
        self.board = open_board(_open_store(host, port), restart_count=launch.restart_count)

    def wait_for(self, event: str, size: int, *, seconds: float) -> None:
        """Wait until so many ranks have counted themselves for `event`, or as long as the store and the time last."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while self.board.counted(event) < size and time.monotonic() < deadline:
                time.sleep(0.02)


def open_board(store: dist.Store, *, restart_count: int = 0) -> FailureBoard:
    """Return the board of a job in the store where its ranks meet."""
    return FailureBoard(dist.PrefixStore(_prefix(restart_count), store))


def _prefix(restart_count: int) -> str:
    return f"automodel/{restart_count}"


def _open_store(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


def _keep_store(port: int) -> dist.TCPStore:
    try:
        return dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise JoinError(f"the ranks cannot meet at port {port} (MASTER_PORT) of this host: {reason}") from None


def _connect(host: str, port: int, *, seconds: float) -> socket.socket:
    """Connect as soon as somebody listens; in small steps, between which a signal can end it."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=min(max(left, 0.1), 5.0))
        except OSError as error:
            if left <= 0:
                raise JoinError(
                    f"the ranks meet at {host}:{port} (MASTER_ADDR, MASTER_PORT), which could not be reached within "
                    f"{_minutes(seconds)} (dist_env.timeout_minutes): {error.strerror or error}"
                ) from None
        time.sleep(min(0.2, max(left, 0.0)))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} minutes"


def _is_consequence(error: BaseException) -> bool:
    """Whether an error looks like the trace of another rank's failure."""
    return isinstance(error, PeerError | dist.DistError) or "gloo/transport" in str(error)
