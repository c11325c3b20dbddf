"""A scripted recipe whose output cannot be written any more, and errors that all ranks raise alike."""

import os
import resource
import sys
from pathlib import Path

# Loaded as a file of a recipe, outside of pytest.
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from scripted_recipe import ScriptedRecipe

__all__ = ["SpoiltOutputRecipe"]

ENOUGH = 50_000  # bytes; what is written to the terminal stays below


class SpoiltOutputRecipe(ScriptedRecipe):
    """More actions."""

    def fail_with_a_full_log(self) -> None:
        """An error of the program after the disk of this rank's log has become full."""
        print("x" * ENOUGH)
        # A file of this size cannot grow, while the small one that stands for the terminal can.
        resource.setrlimit(resource.RLIMIT_FSIZE, (ENOUGH, ENOUGH))
        print("lost")
        self.fail()

    def train_with_a_full_log(self) -> None:
        """A run that goes well, although its output is lost."""
        print("x" * ENOUGH)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ENOUGH, ENOUGH))
        for _ in range(3):
            print("lost")
        self.train()

    def train_with_full_streams(self) -> None:
        """A run that goes well, although nothing reads what it says."""
        self._fill_streams()
        self.train()

    def fail_with_full_streams(self) -> None:
        """The same for one that fails."""
        self._fill_streams()
        self.fail_to_save()

    def fail_to_save(self) -> None:
        """The error that all ranks raise when one of them cannot write its part of a checkpoint."""
        from automodel.checkpoint.store import CheckpointSaveError

        raise CheckpointSaveError("the checkpoint could not be written: rank 0 failed: OSError: no space")

    def _fill_streams(self) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
