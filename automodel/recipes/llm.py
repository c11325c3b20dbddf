"""Training and fine-tuning of causal language models."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

import torch
import yaml

from automodel.checkpoint.store import Checkpointer, RunState
from automodel.config.loader import ConfigNode
from automodel.distributed.device import choose_device
from automodel.distributed.env import read_launch_environment
from automodel.distributed.membership import Membership
from automodel.distributed.mesh import Mesh, build_mesh
from automodel.distributed.rank_group import RankGroup
from automodel.distributed.strategy import check_strategy, make_strategy
from automodel.observe.metrics import discard_rows_after, set_aside
from automodel.observe.run_folder import RunFolder
from automodel.observe.timeline import Timeline
from automodel.recipes import parts
from automodel.recipes.loop import RunOutcome, TrainingJob, TrainingLoop
from automodel.recipes.sections import RecipeSections, build_sections
from automodel.training.loss import IGNORE_INDEX
from automodel.training.precision import compute_dtype
from automodel.training.rng import StatefulRNG, enable_determinism

__all__ = ["TrainFinetuneRecipeForNextTokenPrediction"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainFinetuneRecipeForNextTokenPrediction:
    """Next-token training of a causal language model, from scratch or from a checkpoint, in one process or many.

    Every rank makes one and calls the same methods. `setup` builds everything and restores the newest checkpoint;
    `run_train_validation_loop` trains.
    """

    def __init__(
        self,
        config: ConfigNode,
        *,
        timeline: Timeline | None = None,
        stream: TextIO | None = None,
        membership: Membership | None = None,
    ) -> None:
        """Check the recipe.

        Args:
            config: The recipe.
            timeline: Takes the phases of the start.
            stream: Where progress is shown; standard output by default, on rank zero.
            membership: This process's membership in its job; by default it joins the job of its launch environment.

        Raises:
            ValueError, TypeError, ImportError: the recipe is not right; see `build_sections`.
        """
        self.sections: RecipeSections = build_sections(config)
        self.timeline = timeline or Timeline()
        self._stream = stream
        self._membership = membership
        self.config_text = yaml.safe_dump(config.to_yaml_dict(), sort_keys=False, allow_unicode=True)
        self.job: TrainingJob | None = None
        self._checkpointer: Checkpointer | None = None
        self._own_membership: Membership | None = None

    def setup(self, run_folder: RunFolder) -> None:
        """Build tokenizer, model, data and optimizer, and restore the newest checkpoint.

        Args:
            run_folder: Where the run leaves its files; nothing in it changes before everything else has succeeded.

        Raises:
            ValueError: the parts do not fit each other or the number of processes, or a checkpoint does not fit the
                recipe.
            ImportError: the strategy needs a package that is not installed.
            OSError: the folder of the checkpoints cannot be written.
            FileNotFoundError, RuntimeError: checkpoint.restore_from names no usable checkpoint.
        """
        sections, phase = self.sections, self.timeline.phase
        with phase("processes"):
            mesh, device = self._start_processes()
        self._checkpointer = self._open_checkpoints(run_folder, mesh)
        dtype = compute_dtype(sections.distributed.mp_policy.param_dtype, device=device)
        strategy = make_strategy(sections.distributed, mesh=mesh, device=device, dtype=dtype)
        if sections.deterministic:
            enable_determinism()
        sections.kernels.apply()
        rng = StatefulRNG(sections.rng.seed, sections.rng.ranked, rank=mesh.data.rank)
        with phase("tokenizer"):
            tokenizer = self._in_turn(mesh.world, lambda: parts.build_tokenizer(sections))
        with phase("model"):
            model = parts.build_model(sections, strategy=strategy)
            parts.check_vocabulary(model.inner, tokenizer)
        checkpoint = None if self._checkpointer is None else self._checkpointer.find_resumable(model.inner)
        if checkpoint is None:
            with phase("embedding repair"):
                parts.repair_embeddings(sections, model.inner, tokenizer, ranks=mesh.world)
        loss_fn = parts.build_loss(sections.loss_fn)
        with phase("data"):
            ignored = getattr(loss_fn, "ignore_index", IGNORE_INDEX)
            data = self._in_turn(
                mesh.world, lambda: parts.build_data(sections, tokenizer, ranks=mesh.data, ignore_index=ignored)
            )
        with phase("optimizer"):
            stepping = parts.build_stepping(sections, model, data, loss_fn, strategy=strategy, mesh=mesh, device=device)
        state = RunState(
            model=model.inner,
            optimizer=stepping.optimizer,
            step_scheduler=stepping.scheduler,
            rng=rng,
            dataloader=data.loader,
            tokenizer=tokenizer,
        )
        with phase("resume"):
            self._restore(checkpoint, state)
        if mesh.world.is_main:
            resumed_step = None if checkpoint is None else stepping.scheduler.step
            _prepare_files(run_folder, config_text=self.config_text, resumed_step=resumed_step)
        self.job = TrainingJob(
            sections=sections,
            folder=run_folder,
            config_text=self.config_text,
            timeline=self.timeline,
            stream=self._stream or (sys.stdout if mesh.world.is_main else None),
            device=device,
            dtype=dtype,
            mesh=mesh,
            strategy=strategy,
            module=model.module,
            data=data,
            loss_fn=loss_fn,
            stepping=stepping,
            state=state,
            checkpointer=self._checkpointer,
            restored_from=checkpoint,
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
        """Let other processes use the folder of the checkpoints, and leave the job unless the caller joined it."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._own_membership is not None:
            self._own_membership.close()

    def _start_processes(self) -> tuple[Mesh, torch.device]:
        """Check the recipe against the number of processes, then wait for all of them."""
        sections = self.sections
        if self._membership is None:
            timeout = 60 * sections.dist_env.timeout_minutes
            self._membership = Membership.join(read_launch_environment(), timeout_seconds=timeout)
            self._own_membership = self._membership
        launch = self._membership.launch
        check_strategy(sections.distributed, world_size=launch.world_size)
        sizes = sections.distributed.sizes(launch.world_size)
        sections.step_scheduler.accumulation_steps(sizes.data)
        device = choose_device(launch)
        world = self._membership.start_group(
            backend=sections.dist_env.backend, device=device, timeout_minutes=sections.dist_env.timeout_minutes
        )
        return build_mesh(sizes, world=world, device_type=device.type), device

    def _in_turn(self, world: RankGroup, make: Callable[[], T]) -> T:
        """Call `make` on every rank, so that what it leaves in a cache is made once."""
        return world.in_turn(make, is_node_leader=self._is_node_leader)

    @property
    def _is_node_leader(self) -> bool:
        """Whether this is the first process on its node."""
        assert self._membership is not None
        return self._membership.launch.local_rank == 0

    def _open_checkpoints(self, run_folder: RunFolder, mesh: Mesh) -> Checkpointer | None:
        config = self.sections.checkpoint
        if not config.enabled:
            return None
        root = Path(config.checkpoint_dir) if config.checkpoint_dir is not None else run_folder.checkpoints
        checkpointer = Checkpointer(
            config,
            root=root,
            config_text=self.config_text,
            ranks=mesh.world,
            data_rank=mesh.data.rank,
            is_node_leader=self._is_node_leader,
        )
        checkpointer.open()
        return checkpointer

    def _restore(self, checkpoint: Path | None, state: RunState) -> None:
        """Restore the checkpoint that the run starts from, if any."""
        if self._checkpointer is not None and checkpoint is not None:
            self._checkpointer.restore(checkpoint, state)
            logger.info("resumed from %s", checkpoint)


def _prepare_files(folder: RunFolder, *, config_text: str, resumed_step: int | None) -> None:
    """Write the configuration, and leave in the metrics the rows up to the resumed step, since later ones run again."""
    for file in (folder.training_file, folder.validation_file):
        _prepare_metrics(file, resumed_step=resumed_step)
    folder.write_config(config_text)


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
