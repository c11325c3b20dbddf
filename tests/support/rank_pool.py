"""A pool of processes that act as the ranks of gloo groups, so that a test with several ranks costs no start-up.

    def total(rank, world_size, base):                    # at module level; the pool sends it by file and name
        value = torch.tensor(float(base + rank))
        dist.all_reduce(value)
        return value.item()

    def test_total(ranks):
        assert ranks.run(2, total, 10) == [21.0, 21.0]

The processes start when the first case needs them, and stay. They are forked from one server process that has imported
torch and runs no thread, so that a new one costs little. Every case gets a fresh default group over the loopback
interface, the test's environment and folder, the variables that torchrun sets for a rank, seeds of 0 and one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["RankError", "RankPool"]

FORKSERVER = multiprocessing.get_context("forkserver")
# What takes seconds to import and starts no thread.
PRELOADED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "transformers.modeling_utils")
FORKSERVER.set_forkserver_preload(list(PRELOADED))
START_TIMEOUT = 120.0  # seconds until a new process is ready, the server's import of torch included
DUMP_GRACE = 1.0  # seconds that a hanging rank has to write where it hangs
PEER_GRACE = 0.5  # seconds in which other ranks' failures still count as part of the first one
STOP_TIMEOUT = 5.0
MOST_OUTPUT = 4_000  # characters of each rank's output that a failure shows


class RankError(AssertionError):
    """A case failed on at least one rank.

    Attributes:
        failures: the one-line reason of every rank that failed, died or did not answer, in the order of its discovery;
            the likely cause comes first.
    """

    def __init__(self, message: str, *, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


class _Worker:
    """One process: its connection, its output file and how it ended."""

    def __init__(self, index: int, *, folder: Path) -> None:
        self.index = index
        self.port: int | None = None
        self.output = folder / f"rank-{index}.log"
        self.output.touch()
        self.connection, theirs = FORKSERVER.Pipe()
        with theirs:
            self.process = FORKSERVER.Process(target=rank_worker.main, args=(theirs, index, str(self.output)))
            self.process.start()
        self._output_start = 0

    def send(self, message: dict[str, Any]) -> None:
        """Sends one case; what the process wrote before is no longer shown."""
        self._output_start = self.output.stat().st_size
        with contextlib.suppress(OSError):  # the process is dead: the next `receive` says so
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> dict[str, Any] | None:
        """One answer, or None when the process has ended."""
        try:
            answer: dict[str, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    def ending(self) -> str:
        """How a process ended whose socket is closed."""
        self.process.join(STOP_TIMEOUT)
        status = self.process.exitcode or 0
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def recent_output(self) -> str:
        """What the process wrote during the last case."""
        with self.output.open("rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace")[-MOST_OUTPUT:].strip()

    def kill(self) -> None:
        """Ends the process and everything that it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


class RankPool:
    """Up to `most` processes that run cases as ranks; a context manager, which ends them all.

    After a failure, a death or a time-out the processes are ended; the next case starts new ones. When this process
    ends in any way, its ranks end too.
    """

    def __init__(self, *, most: int = 4) -> None:
        self._most = most
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._cases = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `function(rank, world_size, *args)` on every rank; returns what the ranks return, by rank.

        Args:
            world_size: number of ranks, at least 1.
            function: defined at module level, in any file. What it asserts is not rewritten by pytest.
            args: anything that pickles; so must the return values.
            timeout: seconds for the case, without the start of new processes.

        Raises:
            ValueError: a world size the pool has no room for, or a function that cannot be sent.
            RankError: a rank raised, died or did not answer in time. The text shows the first one's traceback first.
        """
        if not 1 <= world_size <= self._most:
            raise ValueError(f"world_size must be from 1 to {self._most}, got {world_size}")
        case = _describe(function, args=args, timeout=timeout)
        self._start(world_size)
        self._cases += 1
        workers = self._workers[:world_size]
        for worker in workers:
            rank = {"case": self._cases, "rank": worker.index, "world_size": world_size, "port": self._workers[0].port}
            worker.send({**case, **rank})
        finished = False
        try:
            values = self._collect(workers, deadline=time.monotonic() + timeout, timeout=timeout)
            finished = True
        finally:
            if not finished:
                self._kill()
        return [pickle.loads(values[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """Ends every process and waits for it."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + STOP_TIMEOUT
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        atexit.unregister(self.close)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, world_size: int) -> None:
        if any(worker.process.exitcode is not None for worker in self._workers):
            self._kill()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
            atexit.register(self.close)  # before multiprocessing waits for its processes
        new = range(len(self._workers), world_size)
        started = [_Worker(index, folder=Path(self._folder.name)) for index in new]
        self._workers += started
        for worker in started:
            ready = worker.receive() if worker.connection.poll(START_TIMEOUT) else None
            if ready is None:
                text = worker.recent_output()
                self._kill()
                raise RankError(f"rank {worker.index} did not start:\n{text}", failures={worker.index: "no start"})
            worker.port = ready["port"]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _collect(self, workers: list[_Worker], *, deadline: float, timeout: float) -> dict[int, bytes]:
        """The pickled value of every rank; raises RankError at the first sign of trouble."""
        values: dict[int, bytes] = {}
        failures: list[tuple[_Worker, str, str]] = []
        waiting = {worker.connection: worker for worker in workers}
        end = deadline + DUMP_GRACE
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                answer = worker.receive()
                if answer is None:
                    failures.insert(0, (worker, worker.ending(), ""))  # others raise because of it
                elif "error" in answer:
                    failures.append((worker, f"raised {answer['summary']}", answer["error"]))
                else:
                    values[worker.index] = answer["value"]
            if failures:
                end = min(end, time.monotonic() + PEER_GRACE)
        if failures or waiting:
            raise _failure(failures, silent=list(waiting.values()), world_size=len(workers), timeout=timeout)
        return values


def _describe(function: Callable[..., Any], *, args: tuple[Any, ...], timeout: float) -> dict[str, Any]:
    """What every rank is told of a case: where the function is, its arguments, and where modules are found."""
    name = getattr(function, "__qualname__", "<no name>")
    file = inspect.getsourcefile(function) if callable(function) else None
    if "<" in name or file is None or function.__module__ == "__main__":
        raise ValueError(f"function must be defined at the level of a module, got {name}")
    return {
        "module": function.__module__,
        "file": str(Path(file).resolve()),
        "name": name,
        "args": pickle.dumps(args),
        "timeout": timeout,
        "environment": dict(os.environ),
        "path": list(sys.path),
        "folder": str(Path.cwd()),
    }


def _failure(
    failures: list[tuple[_Worker, str, str]], *, silent: list[_Worker], world_size: int, timeout: float
) -> RankError:
    """The exception that tells the whole story: causes first, then who was ended, then what each rank wrote."""
    reasons = {worker.index: reason for worker, reason, _ in failures}
    parts = [f"rank {worker.index} of {world_size} {reason}\n{text}".rstrip() for worker, reason, text in failures]
    numbers = ", ".join(str(worker.index) for worker in silent)
    if silent and failures:
        parts.append(f"still running, and ended by the pool: rank {numbers}")
    elif silent:
        parts.append(f"no answer within {timeout:g} s from rank {numbers} of {world_size}")
        reasons = {worker.index: "did not answer" for worker in silent}
    for worker in [*(worker for worker, _, _ in failures), *silent]:
        if output := worker.recent_output():
            parts.append(f"output of rank {worker.index}:\n{output}")
    return RankError("\n\n".join(parts), failures=reasons)
