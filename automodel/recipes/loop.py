"""The training loop: steps, validations, checkpoints, metrics and the report, until the end or a stop signal."""

import gc
import logging
import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from automodel.checkpoint.directories import find_latest_checkpoint
from automodel.checkpoint.store import Checkpointer, CheckpointSaveError, RunState
from automodel.distributed.config import describe_ranks
from automodel.distributed.mesh import Mesh
from automodel.distributed.strategy import Strategy
from automodel.models.auto import quiet_kernel_fallbacks
from automodel.models.generation import complete
from automodel.models.inspection import summarize_parameters
from automodel.observe.environment import collect_environment, flatten_environment
from automodel.observe.metrics import MetricsWriter, TrainingRow, ValidationRow, read_rows, utc_timestamp
from automodel.observe.progress import Progress
from automodel.observe.report import write_report
from automodel.observe.run_folder import RunFolder
from automodel.observe.timeline import PhaseClock, Timeline
from automodel.recipes.parts import Data, Loss, Stepping
from automodel.recipes.sections import RecipeSections
from automodel.training.loss import NonFiniteLossError
from automodel.training.signals import StopSignals
from automodel.training.step import StepResult, evaluate

__all__ = ["RunOutcome", "TrainingJob", "TrainingLoop"]

logger = logging.getLogger(__name__)

_NAMED_FILES = 12


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Everything that the loop works with, built and restored, on one rank.

    `module` is what to call in training: the model of `state`, or a wrapper around it.
    """

    sections: RecipeSections
    folder: RunFolder
    config_text: str
    timeline: Timeline
    stream: TextIO | None
    device: torch.device
    dtype: torch.dtype
    mesh: Mesh
    strategy: Strategy
    module: nn.Module
    data: Data
    loss_fn: Loss
    stepping: Stepping
    state: RunState
    checkpointer: Checkpointer | None
    restored_from: Path | None


@dataclass(kw_only=True)
class RunOutcome:
    """How a run ended.

    `status` is for people; `losses` holds `train_loss` and `val_loss` of the last step where they are known.
    """

    status: str = "running"
    steps_run: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    sample: str | None = None
    checkpoint: Path | None = None
    report: Path | None = None


class TrainingLoop:
    """Runs a job once. All ranks run the same steps; rank zero alone writes metrics and the report."""

    def __init__(self, job: TrainingJob) -> None:
        """Prepare to run `job`; nothing is written yet."""
        self._job = job
        self._scheduler = job.stepping.scheduler
        self._outcome = RunOutcome(checkpoint=job.restored_from, report=job.folder.report_file)
        self._signals = StopSignals()
        self._stop: signal.Signals | None = None
        self._world = job.mesh.world
        self._clock = PhaseClock()
        self._started = time.monotonic()

    def run(self) -> RunOutcome:
        """Train to the last step or to a stop signal, and leave the report behind, whatever happens.

        Raises:
            NonFiniteLossError: a loss was not finite and the recipe does not skip such batches.
            CheckpointSaveError: a checkpoint could not be written.
        """
        job, scheduler = self._job, self._scheduler
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            if job.device.type == "cpu":
                stack.enter_context(quiet_kernel_fallbacks())
            if self._world.is_main:
                self._training = stack.enter_context(MetricsWriter(job.folder.training_file))
                self._validation = stack.enter_context(MetricsWriter(job.folder.validation_file))
            last_step = max(scheduler.total_steps - 1, scheduler.step)
            self._progress = Progress(job.stream, first_step=scheduler.step + 1, last_step=last_step)
            stack.callback(self._progress.close)
            stack.enter_context(self._progress.log_through())
            if job.sections.step_scheduler.gc_every_steps is not None:
                gc.disable()
                stack.callback(gc.enable)
            try:
                self._run_steps()
            except (NonFiniteLossError, CheckpointSaveError) as error:
                self._outcome.status = f"failed: {error}"
                raise
            except BaseException as error:
                # The text of a foreign error may hold values of the recipe that must not be saved.
                self._outcome.status = f"failed: {type(error).__name__}"
                raise
            finally:
                self._report()
        return self._outcome

    def _run_steps(self) -> None:
        job, scheduler = self._job, self._scheduler
        if scheduler.finished:
            self._complete_earlier_end()
            return
        if scheduler.step < 0 and job.sections.step_scheduler.val_at_start:
            with job.timeline.phase("first validation"):
                self._validate()
        for batches in self._batches():
            if self._outcome.steps_run == 0 and self._agree_to_stop():
                # There is nothing to save yet.
                self._outcome.status = f"stopped by {self._stop_name} before the first step"
                return
            with job.timeline.phase("first step") if self._outcome.steps_run == 0 else nullcontext():
                result = self._step(batches)
            self._after_step(result)
            if self._stop is not None:
                self._outcome.status = f"stopped by {self._stop_name}"
                return
        self._complete_sample()
        self._outcome.status = "finished"

    def _complete_earlier_end(self) -> None:
        """Make up for the validation and the sample that an interruption after the last step left out."""
        self._outcome.status = "already complete"
        rows = self._world.broadcast(read_rows(self._job.folder.validation_file) if self._world.is_main else [])
        validated = [row["step"] for row in rows]
        at_end = self._scheduler.step == self._scheduler.total_steps - 1
        if not at_end or self._job.data.validation_loader is None or self._scheduler.step in validated:
            return
        self._validate()
        if "val_loss" in self._outcome.losses:
            self._keep_late_losses()
            self._complete_sample()

    def _keep_late_losses(self) -> None:
        """Note the losses with the restored checkpoint, which is not written again: it may be the only one."""
        checkpointer, checkpoint = self._job.checkpointer, self._job.restored_from
        if checkpointer is None or checkpoint is None or not checkpointer.holds(checkpoint):
            # Restored from elsewhere, the run has no checkpoint of its own yet.
            self._save()
            return
        checkpointer.update_losses(checkpoint, self._outcome.losses)
        self._progress.message(f"checkpoint {checkpoint}: the losses are updated")

    def _agree_to_stop(self) -> bool:
        """Whether any rank has received a stop signal; all ranks ask at the same places, and stop at the same one."""
        if self._stop is None:
            self._set_stop(self._world.max([self._signals.received or 0])[0])
        return self._stop is not None

    def _set_stop(self, number: float) -> None:
        """Note the number of the signal that some rank received, 0 for none."""
        self._stop = signal.Signals(int(number)) if number else None

    @property
    def _stop_name(self) -> str:
        return "" if self._stop is None else self._stop.name

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """The micro-batches of each step that is left, the wait for them timed."""
        steps = self._scheduler.steps(self._job.data.loader)
        while True:
            with self._clock.phase("data"):
                batches = next(steps, None)
            if batches is None:
                return
            yield batches

    def _step(self, batches: list[dict[str, Any]]) -> StepResult:
        step = self._scheduler.step
        began = time.monotonic()
        result = self._job.stepping.train_step.run(batches, step=step, phase=self._clock.phase)
        seconds = self._clock.take()
        if not result.applied:
            self._handle_nonfinite(result, batches)
        spent = [seconds.get(phase, 0.0) for phase in ("data", "forward", "backward", "optimizer")]
        mine = [self._signals.received or 0, self._peak_memory(), *spent, time.monotonic() - began + spent[0]]
        # The slowest rank is what everybody waited for, and a signal to one rank stops all.
        stop, memory, data, forward, backward, update, time_step = self._world.max(mine)
        self._set_stop(stop)
        row = TrainingRow(
            step=step,
            epoch=self._scheduler.epoch,
            timestamp=utc_timestamp(),
            loss=_finite(result.loss),
            grad_norm=_finite(result.grad_norm),
            lr=result.lr,
            mem=memory,
            tps=result.num_tokens / time_step,
            tps_per_gpu=result.num_tokens / time_step / self._world.size,
            mfu=None,
            num_tokens_per_step=result.num_tokens,
            num_label_tokens=result.num_label_tokens,
            time_data=data,
            time_forward=forward,
            time_backward=backward,
            time_optimizer=update,
            time_step=time_step,
            skipped=not result.applied,
        )
        self._outcome.steps_run += 1
        if self._world.is_main:
            self._training.append(row)
        self._progress.step(row)
        return result

    def _after_step(self, result: StepResult) -> None:
        """Validate, save and collect garbage where that is due; a stop signal brings a checkpoint too."""
        scheduler = self._scheduler
        self._outcome.losses = {"train_loss": result.loss} if result.applied else {}
        if scheduler.is_validation_due and self._stop is None:
            self._validate(lr=result.lr)
        if scheduler.is_checkpoint_due or self._stop is not None:
            self._save()
        if scheduler.is_gc_due:
            gc.collect()

    def _handle_nonfinite(self, result: StepResult, batches: list[dict[str, Any]]) -> None:
        """Stop, or say what is skipped: a loss or gradient norm was NaN or infinite, and nothing was updated."""
        job = self._job
        by_rank = self._world.all_gather(_source_files(job.data.dataset, batches))
        files = list(dict.fromkeys(file for files in by_rank for file in files))
        named = ", ".join(files[:_NAMED_FILES]) or "unknown"
        more = f" and {len(files) - _NAMED_FILES} more" if len(files) > _NAMED_FILES else ""
        step, total = self._scheduler.step, self._scheduler.total_steps
        what = f"step {step + 1}/{total}: the loss is {result.loss}, the gradient norm {result.grad_norm}"
        if job.sections.step_scheduler.nonfinite_loss == "skip":
            if self._world.is_main:
                logger.warning("%s; the batch is skipped (files: %s%s)", what, named, more)
            return
        last = None if job.checkpointer is None else find_latest_checkpoint(job.checkpointer.root)
        raise NonFiniteLossError(
            f"{what}; files of the batch: {named}{more}; last good checkpoint: {last or 'none'}; "
            "step_scheduler.nonfinite_loss: skip would leave such batches out"
        )

    def _validate(self, *, lr: float = 0.0) -> None:
        job = self._job
        if job.data.validation_loader is None:
            return
        began = time.monotonic()
        evaluation = evaluate(
            job.module,
            job.loss_fn,
            job.data.validation_loader,
            strategy=job.strategy,
            data_ranks=job.mesh.data,
            device=job.device,
            should_stop=self._agree_to_stop,
        )
        if evaluation is None:
            return
        memory, seconds = self._world.max([self._peak_memory(), time.monotonic() - began])
        row = ValidationRow(
            step=self._scheduler.step,
            epoch=self._scheduler.epoch,
            timestamp=utc_timestamp(),
            val_loss=_finite(evaluation.loss),
            lr=lr,
            mem=memory,
            tps=evaluation.num_label_tokens / seconds,
            num_label_tokens=evaluation.num_label_tokens,
            time_validation=seconds,
        )
        if math.isfinite(evaluation.loss):
            self._outcome.losses["val_loss"] = evaluation.loss
        if self._world.is_main:
            self._validation.append(row)
        self._progress.validation(row)

    def _save(self) -> None:
        job = self._job
        if job.checkpointer is None:
            return
        began = time.monotonic()
        self._outcome.checkpoint = job.checkpointer.save(
            job.state, losses=self._outcome.losses, final=self._scheduler.finished
        )
        seconds = time.monotonic() - began
        self._progress.message(f"checkpoint {self._outcome.checkpoint} saved in {seconds:.1f} s")
        self._report()

    def _complete_sample(self) -> None:
        job = self._job
        prompt = getattr(job.data.validation_dataset, "sample_prompt", None)
        if prompt is None or job.state.tokenizer is None:
            return
        try:
            # Every rank takes part, since a sharded model is gathered for each token; rank zero's tokens count.
            self._outcome.sample = complete(job.state.model, job.state.tokenizer, prompt, choose=self._world.broadcast)
        except Exception:
            logger.exception("no sample completion of %r", prompt)
        else:
            self._progress.message(f"sample completion:\n{self._outcome.sample}")

    def _peak_memory(self) -> float:
        """GiB: the allocator's peak on a GPU, this process's peak resident size on a CPU."""
        if self._job.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._job.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def _report(self) -> None:
        """Write the page; it tells about the run, so that a failure to write it must not change how the run ends."""
        job, outcome = self._job, self._outcome
        if not self._world.is_main:
            return
        try:
            write_report(
                job.folder.report_file,
                title=job.folder.path.name,
                training=read_rows(job.folder.training_file),
                validation=read_rows(job.folder.validation_file),
                startup=job.timeline.phases,
                config_text=job.config_text,
                environment=flatten_environment(collect_environment()),
                sample=outcome.sample,
                status=outcome.status,
                facts=self._facts(),
            )
        except (OSError, ValueError) as error:
            logger.warning("the report %s could not be written: %s", job.folder.report_file, error)

    def _facts(self) -> dict[str, str]:
        job = self._job
        model = job.state.model
        parameters = summarize_parameters(model)
        return {
            "Model": type(model).__name__,
            "Parameters": f"{parameters.total:,} ({parameters.trainable:,} trainable)",
            "Device": str(job.device),
            "Processes": describe_ranks(job.mesh.sizes, job.sections.distributed),
            "Computation": str(job.dtype).removeprefix("torch."),
            "Samples per step": str(job.sections.step_scheduler.global_batch_size),
            "Steps": f"{self._scheduler.step + 1} of {self._scheduler.total_steps}",
            "Resumed from": str(job.restored_from or "a fresh start"),
            "Last checkpoint": str(self._outcome.checkpoint or "none"),
            "Time in the loop": f"{time.monotonic() - self._started:.0f} s",
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _source_files(dataset: Any, batches: list[dict[str, Any]]) -> list[str]:
    """The files that a step's samples came from, each once, in order; none where the dataset cannot tell."""
    sources = getattr(dataset, "sources", None)
    if sources is None:
        return []
    indices = [index for batch in batches for index in batch.get("sample_indices", ())]
    return list(dict.fromkeys(name for index in indices for name in sources(index)))
