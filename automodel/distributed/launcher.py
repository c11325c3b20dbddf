"""Several ranks on this machine, started with the part of torchrun's library that runs processes.

There is no agent between this process and the ranks, since nothing is ever started again: signals go to the ranks at
once and as they come, each rank ends when it is ready, and only what the ranks say is shown.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

from automodel.distributed.env import unset_rank_defaults
from automodel.distributed.failures import FailureBoard
from automodel.distributed.membership import END_GRACE, LINGER, open_board

__all__ = ["LaunchOutcome", "launch_ranks"]

_HOST = "127.0.0.1"
_PERIOD = 0.1  # seconds between two looks at the ranks
_AFTER_FAILURE = END_GRACE + LINGER + 3.0  # seconds in which ranks end by themselves after one has failed
_CLOSING = 2  # seconds that SIGTERM has before SIGKILL follows
_INTERRUPTED = 130  # the exit status of a rank that Ctrl-C has ended
_CTRL_C_KILLS = 3  # the first saves, the second interrupts
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How the ranks ended.

    Attributes:
        statuses: Their exit statuses by rank; a signal that ended one is a negative number.
        message: What nobody else could say, such as that a rank was killed; None when the ranks said it all.
        signal: The first signal that this process passed on.
    """

    statuses: tuple[int, ...]
    message: str | None
    signal: signal.Signals | None

    @property
    def status(self) -> int:
        """The exit status of the whole job.

        Mistakes (2) and interruptions (130) are what the ranks say; a rank that ends because of another one says 1.
        """
        said = max((status for status in self.statuses if status > 0), default=0)
        if any(status < 0 for status in self.statuses) and self.signal is not None and said <= 1:
            return 128 + self.signal
        return said or int(any(self.statuses))


def launch_ranks(words: Sequence[str], *, processes: int) -> LaunchOutcome:
    """Run `python -m automodel WORDS` in so many processes on this machine, as ranks of one job, until all have ended.

    Call it in the main thread; SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to the ranks meanwhile,
    except those that this process ignores, such as SIGHUP under nohup.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    environments = {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **unset_rank_defaults(processes),
        }
        for rank in range(processes)
    }
    arguments = (*_interpreter_options(), "-m", "automodel", *words)
    with _Forwarding() as forwarding:
        context = _start(arguments, environments)
        try:
            ranks = _Ranks(context, board=open_board(store))
            forwarding.start(ranks)
            ranks.wait()
        finally:
            context.close(signal.SIGTERM, timeout=_CLOSING)
        return LaunchOutcome(statuses=ranks.statuses, message=ranks.message, signal=forwarding.first)


def _start(arguments: tuple[str, ...], environments: dict[int, dict[str, str]]) -> SubprocessContext:
    """Start the ranks in a thread, since in the main thread the library takes the signals over."""
    # It warns about that, and tells in lines of its own what this module tells in one.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with ThreadPoolExecutor(max_workers=1) as executor:
        started = executor.submit(
            start_processes,
            name="automodel",
            entrypoint=sys.executable,
            args=dict.fromkeys(environments, arguments),
            envs=environments,
            # No folder, which would stay where this process is killed.
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        context = started.result()
    assert isinstance(context, SubprocessContext)
    return context


class _Ranks:
    """The processes of the ranks, watched until they end."""

    def __init__(self, context: SubprocessContext, *, board: FailureBoard) -> None:
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._board = board
        self._culprit: tuple[int, int] | None = None

    @property
    def statuses(self) -> tuple[int, ...]:
        """Exit statuses by rank; a rank that has not ended counts as killed."""
        statuses = (process.returncode for _, process in sorted(self._processes.items()))
        return tuple(-signal.SIGKILL if status is None else status for status in statuses)

    @property
    def message(self) -> str | None:
        """What the first rank that failed could not say itself."""
        if self._culprit is None:
            return None
        rank, status = self._culprit
        # A rank that is interrupted before it has joined leaves it to rank zero to say so.
        if status in (_INTERRUPTED, -signal.SIGINT) and self.statuses[0] == _INTERRUPTED:
            return None
        hint = " (was there enough memory?)" if status == -signal.SIGKILL else ""
        return f"[rank {rank}] {_describe_end(status)}{hint}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run."""
        for process in self._processes.values():
            process.send_signal(number)

    def wait(self) -> None:
        """Return when all ranks have ended, or when the time is up that they have after the first failure."""
        deadline: float | None = None
        running = dict(self._processes)
        while running:
            for rank, process in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[rank]
                if status and deadline is None:
                    deadline = time.monotonic() + _AFTER_FAILURE
                    self._announce(rank, status)
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(_PERIOD)

    def _announce(self, rank: int, status: int) -> None:
        """Tell the other ranks, unless the rank has done so."""
        if self._board.announce(rank, _describe_end(status)):
            self._culprit = rank, status


class _Forwarding:
    """A context in which stop signals go to the ranks instead of ending this process; a third Ctrl-C kills them."""

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._ranks: _Ranks | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def first(self) -> signal.Signals | None:
        """The first signal that came."""
        return self._received[0] if self._received else None

    def __enter__(self) -> Self:
        for number in _FORWARDED:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def start(self, ranks: _Ranks) -> None:
        """Send the ranks what came so far, and from now on."""
        self._ranks = ranks
        for number in tuple(self._received):
            ranks.send(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self._received.append(received)
        if self._ranks is not None:
            insists = self._received.count(signal.SIGINT) >= _CTRL_C_KILLS
            self._ranks.send(signal.SIGKILL if insists else received)


def _describe_end(status: int) -> str:
    if status == _INTERRUPTED:
        return "was interrupted"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _interpreter_options() -> tuple[str, ...]:
    """Whether the ranks find modules in the working folder: as this process does, by the way it was started."""
    return () if sys.path and sys.path[0] in ("", str(Path.cwd())) else ("-P",)
