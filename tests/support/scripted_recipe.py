"""A recipe class that does what a recipe's section `script` says: one action for each rank, no model and no data.

    recipe: {_target_: .../scripted_recipe.py:ScriptedRecipe}
    script: {0: "compute", 1: "raise"}

Ranks that the script does not name train: they take part in a few collectives and end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from automodel.distributed.rank_group import RankGroup

if TYPE_CHECKING:
    from automodel.observe.run_folder import RunFolder

__all__ = ["ScriptedRecipe"]


class ScriptedRecipe:
    """Runs the action of its rank; files named after the rank tell how far it came."""

    def __init__(self, config: Any, *, timeline: Any, stream: Any, membership: Any) -> None:
        self.action = str((config.get("script") or {}).get(membership.rank, "train"))
        self.minutes = (config.get("dist_env") or {}).get("timeout_minutes", 10)
        self.backend = (config.get("dist_env") or {}).get("backend")
        self.membership = membership
        self.group = RankGroup()
        if self.action == "refuse":
            raise ValueError("script must be sensible, got refuse")

    def setup(self, folder: RunFolder) -> None:
        """Meets the other ranks."""
        self.folder = folder
        if self.action == "absent":
            time.sleep(60)
        self.group = self.membership.start_group(
            backend=self.backend, device=torch.device("cpu"), timeout_minutes=self.minutes
        )
        logging.getLogger("scripted").info("rank %d is set up", self.membership.rank)
        (folder.path / f"pid_{self.membership.rank}").write_text(str(os.getpid()))
        if self.action == "refuse in setup":
            raise ValueError("script must be sensible, got refuse in setup")

    def run_train_validation_loop(self) -> Any:
        """Runs the action."""
        self.group.barrier()
        print(f"said by rank {self.membership.rank}")
        os.write(2, f"written by rank {self.membership.rank}\n".encode())
        getattr(self, self.action.replace(" ", "_"))()
        return SimpleNamespace(status="finished", steps_run=3, losses={"train_loss": 0.5}, report="report.html")

    def close(self) -> None:
        """Nothing is open."""

    def train(self) -> None:
        """A few collectives."""
        for _ in range(3):
            assert self.group.sum([1.0]) == [float(self.group.size)]

    def compute(self) -> None:
        """Work that never asks for another rank."""
        while True:
            sum(range(1000))

    def hang(self) -> None:
        """A collective that the others never join."""
        try:
            dist.recv(torch.zeros(1), src=(self.group.rank + 1) % self.group.size)
        finally:
            (self.folder.path / f"unwound_{self.group.rank}").touch()

    def stuck(self) -> None:
        """A wait that no signal and no exception ends, as a collective on a GPU is."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        threading.Event().wait()

    def fail(self) -> None:
        """An error of the program."""
        raise KeyError("no such key")

    def fail_together(self) -> None:
        """The error of one rank, which all learn of."""
        with self.group.together():
            if self.group.rank == self.group.size - 1:
                raise OSError("the disk is full")

    def join_together(self) -> None:
        """The other ranks' part of `fail together`."""
        self.fail_together()

    def die(self) -> None:
        """A kill from outside."""
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """An end that is no exception."""
        sys.exit(3)

    def stop_on_interrupt(self) -> None:
        """Notes every signal that the training loop would remember, and saves at SIGINT."""
        from automodel.training.signals import StopSignals

        with StopSignals() as signals:
            (self.folder.path / f"ready_{self.group.rank}").touch()
            while not self.group.any(signals.received == signal.SIGINT):
                if signals.received is not None:
                    (self.folder.path / f"{signals.received.name}_{self.group.rank}").touch()
        (self.folder.path / f"saved_{self.group.rank}").touch()
