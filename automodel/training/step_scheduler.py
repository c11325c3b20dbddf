"""Which step is next, what a step consists of, and what is due after it. Steps and epochs count from 0."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from automodel.config.sections import refuse, setting

__all__ = ["StepScheduler", "StepSchedulerConfig"]

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepSchedulerConfig:
    """Recipe section `step_scheduler`."""

    global_batch_size: int = setting(1, "samples per optimizer step, over all ranks")
    local_batch_size: int = setting(1, "samples per forward pass on one rank")
    max_steps: int | None = setting(None, "optimizer steps after which training ends; null: the epochs decide")
    num_epochs: int = setting(10, "passes over the training data after which training ends")
    ckpt_every_steps: int | None = setting(None, "steps between checkpoints; null: at epoch ends and at the end only")
    val_every_steps: int | None = setting(None, "steps between validations; null: at the end only")
    val_at_start: bool = setting(False, "validate before the first step as well")
    gc_every_steps: int | None = setting(None, "steps between runs of Python's garbage collector; null: its own rhythm")
    log_remote_every_steps: int = setting(1, "steps between rows sent to a remote tracker")
    save_checkpoint_every_epoch: bool = setting(True, "checkpoint at the end of every epoch")
    nonfinite_loss: Literal["stop", "skip"] = setting("stop", "on a loss that is not finite: stop, or skip the batch")

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "local_batch_size", "num_epochs", "log_remote_every_steps"):
            if getattr(self, name) < 1:
                raise refuse(f"step_scheduler.{name}", getattr(self, name), "positive")
        for name in ("max_steps", "ckpt_every_steps", "val_every_steps", "gc_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refuse(f"step_scheduler.{name}", value, "positive or null")
        if self.global_batch_size % self.local_batch_size:
            raise refuse(
                "step_scheduler.global_batch_size",
                self.global_batch_size,
                f"a multiple of local_batch_size ({self.local_batch_size})",
            )

    def accumulation_steps(self, dp_size: int) -> int:
        """Forward passes per optimizer step on each of `dp_size` ranks.

        Raises:
            ValueError: the global batch does not divide evenly.
        """
        per_pass = self.local_batch_size * dp_size
        if self.global_batch_size % per_pass:
            raise refuse(
                "step_scheduler.global_batch_size",
                self.global_batch_size,
                f"a multiple of local_batch_size x data-parallel ranks ({self.local_batch_size} x {dp_size})",
            )
        return self.global_batch_size // per_pass


class _EpochLoader(Protocol):
    """What the scheduler asks of a data loader: a length, one epoch per iteration, and the epoch's number."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def set_epoch(self, epoch: int) -> None: ...


class StepScheduler:
    """Walks through epochs and steps, and says after each step what is due.

    Attributes:
        step: The step that runs, or that ran last; -1 before the first.
        epoch: The epoch of that step.
    """

    def __init__(
        self,
        config: StepSchedulerConfig,
        *,
        batches_per_epoch: int,
        dp_size: int = 1,
        drop_last: bool = False,
        num_samples: int | None = None,
    ) -> None:
        """Lay out the steps.

        An epoch has as many steps as it has global batches, whatever the number of ranks and the local batch size:
        num_samples / global_batch_size, rounded down with `drop_last` and up without. That needs a loader which leaves
        out an incomplete last batch exactly if `drop_last` is set.

        Args:
            config: The recipe section.
            batches_per_epoch: Forward passes that one epoch of the data holds on each rank.
            dp_size: Data-parallel ranks.
            drop_last: Leave out the last micro-batches of an epoch that do not make a whole step; otherwise they make
                a smaller one.
            num_samples: Samples in the training data, named by the error where they are too few; None: the samples of
                the batches are named.

        Raises:
            ValueError: an epoch holds no step, or the global batch does not divide evenly.
        """
        self._config = config
        self._accumulation_steps = config.accumulation_steps(dp_size)
        whole_steps, rest = divmod(batches_per_epoch, self._accumulation_steps)
        self.steps_per_epoch = whole_steps if drop_last or not rest else whole_steps + 1
        if self.steps_per_epoch < 1:
            samples = batches_per_epoch * config.local_batch_size * dp_size if num_samples is None else num_samples
            raise ValueError(
                f"step_scheduler.global_batch_size must be at most the number of training samples ({samples}), "
                f"got {config.global_batch_size}: an epoch would hold no step; "
                "lower it, or keep incomplete batches with dataloader.drop_last: false"
            )
        by_epochs = config.num_epochs * self.steps_per_epoch
        self.total_steps = by_epochs if config.max_steps is None else min(config.max_steps, by_epochs)
        self.step = -1
        self.epoch = 0

    @property
    def finished(self) -> bool:
        """Whether the last step has run."""
        return self.step + 1 >= self.total_steps

    def steps(self, loader: _EpochLoader) -> Iterator[list[dict[str, Any]]]:
        """Yield the micro-batches of each step that is left, from the position where `loader` stands.

        The last step of an epoch takes the batches that are left, which may be fewer. With drop_last an epoch ends with
        its last whole step, and the loader goes on with the next epoch.

        Raises:
            RuntimeError: the loader gives no batch where its length promised some.
        """
        while not self.finished:
            self.epoch = (self.step + 1) // self.steps_per_epoch
            loader.set_epoch(self.epoch)
            for batches in _groups(loader, self._accumulation_steps):
                self.step += 1
                yield batches
                if self.finished or self.is_epoch_end:
                    break
            else:
                # Going on would run the rest of the epoch's steps on its first batches once more.
                raise RuntimeError(f"the data loader gave no batch for step {self.step + 1} in epoch {self.epoch}")

    @property
    def is_epoch_end(self) -> bool:
        """Whether the step that ran is the last of its epoch."""
        return (self.step + 1) % self.steps_per_epoch == 0

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint belongs after the step that ran: every ckpt_every_steps, at epoch ends, at the end."""
        at_epoch_end = self._config.save_checkpoint_every_epoch and self.is_epoch_end
        return self.finished or at_epoch_end or self._is_every(self._config.ckpt_every_steps)

    @property
    def is_validation_due(self) -> bool:
        """Whether a validation belongs after the step that ran: every val_every_steps and at the end."""
        return self.finished or self._is_every(self._config.val_every_steps)

    @property
    def is_gc_due(self) -> bool:
        """Whether Python's garbage collector should run after the step that ran."""
        return self._is_every(self._config.gc_every_steps)

    def state_dict(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "epoch": self.epoch,
            "steps_per_epoch": self.steps_per_epoch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the position of a checkpoint: the next step is the one after it.

        Raises:
            ValueError: the state is of a newer version, or of a run whose epochs had another number of steps, so that
                the step's number means another place in the data.
        """
        if state["version"] > STATE_VERSION:
            raise ValueError(f"the step scheduler's state has version {state['version']}, newer than {STATE_VERSION}")
        if state["steps_per_epoch"] != self.steps_per_epoch:
            raise ValueError(
                f"the checkpoint's epochs have {state['steps_per_epoch']} steps, but {self.steps_per_epoch} here: "
                "to resume, keep the dataset and step_scheduler.global_batch_size"
            )
        self.step = state["step"]
        self.epoch = state["epoch"]

    def _is_every(self, interval: int | None) -> bool:
        return interval is not None and (self.step + 1) % interval == 0


def _groups(batches: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
