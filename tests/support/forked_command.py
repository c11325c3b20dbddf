"""Runs of the command `automodel` in processes that need not import torch: they are forked from the pool's server.

with ForkedCommand(["run", "recipe.yaml"], folder=tmp_path, environment={"RANK": "1", ...}) as command:
    assert command.wait() == 0
    assert command.stdout == "..."
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rank_worker
from rank_pool import FORKSERVER

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["ForkedCommand", "clean_environment", "free_port", "wait_until"]

TIMEOUT = 60.0  # seconds
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


class ForkedCommand:
    """One process that runs `automodel WORDS`; a context that ends it."""

    def __init__(self, words: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._outputs = Path(tempfile.mkdtemp(dir=folder, prefix="output-"))
        settings = {**clean_environment(), "GLOO_SOCKET_IFNAME": rank_worker.LOOPBACK, **(environment or {})}
        self._process = FORKSERVER.Process(target=_run, args=(list(words), str(folder), settings, str(self._outputs)))
        self._process.start()

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return (self._outputs / "1").read_text()

    @property
    def stderr(self) -> str:
        """What it has written to standard error."""
        return (self._outputs / "2").read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """Waits for its end; returns the exit status, negative for a signal.

        Raises:
            AssertionError: it runs for too long.
        """
        self._process.join(TIMEOUT)
        status = self._process.exitcode
        assert status is not None, f"still running:\n{self.stdout}\n{self.stderr}"
        return status


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher of processes may have put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition.

    Raises:
        AssertionError: it does not come true in time.
    """
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def _run(words: list[str], folder: str, environment: dict[str, str], outputs: str) -> None:
    for stream in (1, 2):
        with (Path(outputs) / str(stream)).open("wb") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = folder
    import torch

    torch.set_num_threads(1)
    from automodel.cli.main import main

    status = main(words)
    sys.stdout.flush()
    sys.exit(status)
