"""Training and fine-tuning of causal language models."""

import logging
import sys
from pathlib import Path
from typing import TextIO

import torch
import yaml

from automodel.checkpoint.store import Checkpointer, RunState
from automodel.config.loader import ConfigNode
from automodel.distributed.env import read_launch_environment
from automodel.observe.metrics import discard_rows_after, set_aside
from automodel.observe.run_folder import RunFolder
from automodel.observe.timeline import Timeline
from automodel.recipes import parts
from automodel.recipes.loop import RunOutcome, TrainingJob, TrainingLoop
from automodel.recipes.sections import RecipeSections, build_sections
from automodel.training.optim import LearningRateSchedule
from automodel.training.precision import compute_dtype
from automodel.training.rng import StatefulRNG, enable_determinism
from automodel.training.step import TrainStep
from automodel.training.step_scheduler import StepScheduler

__all__ = ["TrainFinetuneRecipeForNextTokenPrediction"]

logger = logging.getLogger(__name__)


class TrainFinetuneRecipeForNextTokenPrediction:
    """Next-token training of a causal language model, from scratch or from a checkpoint, in one process.

    `setup` builds everything and restores the newest checkpoint; `run_train_validation_loop` trains.
    """

    def __init__(
        self,
        config: ConfigNode,
        *,
        timeline: Timeline | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Check the recipe.

        Args:
            config: The recipe.
            timeline: Takes the phases of the start.
            stream: Where progress is shown; standard output by default.

        Raises:
            ValueError, TypeError, ImportError: the recipe is not right; see `build_sections`.
        """
        self.sections: RecipeSections = build_sections(config)
        self.timeline = timeline or Timeline()
        self.stream = stream or sys.stdout
        self.config_text = yaml.safe_dump(config.to_yaml_dict(), sort_keys=False, allow_unicode=True)
        self.job: TrainingJob | None = None
        self._checkpointer: Checkpointer | None = None

    def setup(self, run_folder: RunFolder) -> None:
        """Build tokenizer, model, data and optimizer, and restore the newest checkpoint.

        Args:
            run_folder: Where the run leaves its files; nothing in it changes before everything else has succeeded.

        Raises:
            ValueError: the parts do not fit each other, or a checkpoint does not fit the recipe.
            OSError: the folder of the checkpoints cannot be written.
            FileNotFoundError, RuntimeError: checkpoint.restore_from names no usable checkpoint.
        """
        sections, phase = self.sections, self.timeline.phase
        launch = read_launch_environment()
        sections.distributed.check_world_size(launch.world_size)
        self._checkpointer = self._open_checkpoints(run_folder)
        device = torch.device("cuda", launch.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        dtype = compute_dtype(sections.distributed.mp_policy.param_dtype, device=device)
        if sections.deterministic:
            enable_determinism()
        rng = StatefulRNG(sections.rng.seed, sections.rng.ranked, rank=launch.rank)
        with phase("tokenizer"):
            tokenizer = parts.build_tokenizer(sections)
        with phase("model"):
            model = parts.build_model(sections, device=device)
            parts.check_vocabulary(model, tokenizer)
        with phase("data"):
            data = parts.build_data(sections, tokenizer)
        with phase("optimizer"):
            optimizer = parts.build_optimizer(sections.optimizer, model)
            scheduler = StepScheduler(sections.step_scheduler, batches_per_epoch=len(data.loader))
            loss_fn = parts.build_loss(sections.loss_fn)
            schedule = LearningRateSchedule(optimizer, sections.lr_scheduler, total_steps=scheduler.total_steps)
            max_norm = sections.clip_grad_norm.max_norm
            train_step = TrainStep(model, loss_fn, optimizer, schedule, max_norm=max_norm, dtype=dtype, device=device)
        state = RunState(
            model=model,
            optimizer=optimizer,
            step_scheduler=scheduler,
            rng=rng,
            dataloader=data.loader,
            tokenizer=tokenizer,
        )
        with phase("resume"):
            restored_from = self._restore(state)
        for file in (run_folder.training_file, run_folder.validation_file):
            _prepare_metrics(file, resumed_step=None if restored_from is None else scheduler.step)
        run_folder.write_config(self.config_text)
        self.job = TrainingJob(
            sections=sections,
            folder=run_folder,
            config_text=self.config_text,
            timeline=self.timeline,
            stream=self.stream,
            device=device,
            dtype=dtype,
            data=data,
            loss_fn=loss_fn,
            train_step=train_step,
            scheduler=scheduler,
            state=state,
            checkpointer=self._checkpointer,
            restored_from=restored_from,
        )

    def run_train_validation_loop(self) -> RunOutcome:
        """Train to the last step, or until a stop signal; validate, save and report on the way.

        Raises:
            RuntimeError: `setup` has not run.
            NonFiniteLossError: a loss was not finite and the recipe does not skip such batches.
            CheckpointSaveError: a checkpoint could not be written.
        """
        if self.job is None:
            raise RuntimeError("call setup() before run_train_validation_loop()")
        return TrainingLoop(self.job).run()

    def close(self) -> None:
        """Let other processes use the folder of the checkpoints."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _open_checkpoints(self, run_folder: RunFolder) -> Checkpointer | None:
        config = self.sections.checkpoint
        if not config.enabled:
            return None
        root = Path(config.checkpoint_dir) if config.checkpoint_dir is not None else run_folder.checkpoints
        checkpointer = Checkpointer(config, root=root, config_text=self.config_text)
        checkpointer.open()
        return checkpointer

    def _restore(self, state: RunState) -> Path | None:
        """Restore the checkpoint that the run should start from and return it, or None for a fresh start."""
        if self._checkpointer is None:
            return None
        checkpoint = self._checkpointer.find_resumable(state.model)
        if checkpoint is not None:
            self._checkpointer.restore(checkpoint, state)
            logger.info("resumed from %s", checkpoint)
        return checkpoint


def _prepare_metrics(file: Path, *, resumed_step: int | None) -> None:
    """Leave in `file` the rows up to the resumed step, since later ones run again; a fresh start sets it aside."""
    if resumed_step is None:
        set_aside(file)
        return
    try:
        discard_rows_after(file, resumed_step)
    except ValueError as error:
        logger.warning("%s", error)
        set_aside(file)
