"""Saving and restoring a run: one directory per checkpoint, in the layout that users of the reference system know.

epoch_<E>_step_<S>/
  checkpoint.json (format, version, step, epoch, model signature)  config.yaml (redacted)  losses.json
  model/shard-*.safetensors  model/consolidated/ (readable by transformers)  optim/ (DCP)
  step_scheduler.pt  rng/rng_global_rank_<R>.pt  dataloader/dataloader_dp_rank_<R>.pt

All ranks of a job save and restore together, in a folder that all of them see. Each writes its own part; rank zero
also writes what there is once, and moves the pointers when every rank has said that its part is on the disk. A
checkpoint can be restored by another number of ranks than saved it.
"""

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from automodel.caches.folder_lock import FolderLock
from automodel.checkpoint import tensors
from automodel.checkpoint.directories import (
    LATEST,
    LOWEST_VAL,
    MANIFEST,
    checkpoint_name,
    clear_checkpoint_incomplete,
    find_complete_checkpoints,
    find_latest_checkpoint,
    is_checkpoint_incomplete,
    list_automodel_checkpoints,
    mark_checkpoint_incomplete,
    point_to,
    resolve_restore_from_to_checkpoint_dir,
    sync_directory,
)
from automodel.checkpoint.losses import LOSSES, follow_lowest, read_losses, replace_losses, write_losses
from automodel.checkpoint.manifest import FORMAT_VERSION, make_manifest, read_manifest
from automodel.checkpoint.replacement import drop_replaced, put_in_place, replacement_of, settle_replacements
from automodel.checkpoint.retention import prune_checkpoints
from automodel.config.sections import refuse, setting
from automodel.distributed.rank_group import PeerError, RankGroup
from automodel.models.export import save_for_transformers

__all__ = ["FORMAT_VERSION", "CheckpointConfig", "CheckpointSaveError", "Checkpointer", "RunState"]

logger = logging.getLogger(__name__)

# What reading a damaged or foreign file raises, besides ValueError, which says itself what does not fit.
_LOAD_ERRORS = (
    AssertionError,
    CheckpointException,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Recipe section `checkpoint`."""

    enabled: bool = setting(True, "save checkpoints and resume from them")
    checkpoint_dir: str | None = setting(None, "folder of the checkpoints; null: checkpoints/ in the run folder")
    model_save_format: Literal["safetensors", "torch_save"] = setting(
        "safetensors", "format of the model's tensors", off=("safetensors",)
    )
    save_consolidated: bool | Literal["final", "every"] = setting(
        "final", "which checkpoints also hold a copy that transformers loads: false, final, every (true)"
    )
    is_async: bool | None = setting(None, "write in the background", off=(None, False))
    max_recent_checkpoints: int | None = setting(None, "complete checkpoints to keep besides the pointed-at; null: all")
    best_metric_key: str = setting("val_loss", "validation metric that LOWEST_VAL follows")
    restore_from: str | None = setting(None, "LATEST, LOWEST_VAL, a checkpoint's name or path; null: the newest")
    staging_dir: str | None = setting(None, "local folder that saves go through", off=(None,))
    dequantize_base_checkpoint: bool | None = setting(None, "load a quantized base model", off=(None, False))

    def __post_init__(self) -> None:
        if self.max_recent_checkpoints is not None and self.max_recent_checkpoints < 1:
            raise refuse("checkpoint.max_recent_checkpoints", self.max_recent_checkpoints, "positive or null")

    def wants_consolidated(self, *, final: bool) -> bool:
        """Whether a checkpoint, the run's last one or not, also holds the copy for transformers."""
        match self.save_consolidated:
            case False:
                return False
            case "final":
                return final
            case _:
                return True


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; the message names it and the last good one, which is untouched."""


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _RandomState(_Stateful, Protocol):
    def load_state_of_rank_zero(self, state: dict[str, Any], *, rank: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that a checkpoint carries of a run on this rank.

    The model is the one whose state has its plain names: the module inside a DistributedDataParallel, not the wrapper.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_scheduler: _Stateful
    rng: _RandomState
    dataloader: _Stateful
    tokenizer: Any = None


class Checkpointer:
    """Saves, finds and restores the checkpoints in one folder; all ranks of the job call each method together."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        root: Path,
        config_text: str,
        ranks: RankGroup | None = None,
        data_rank: int | None = None,
        is_node_leader: bool = True,
    ) -> None:
        """Use the folder `root`, which need not exist yet.

        Args:
            config: The recipe section.
            root: Folder of the checkpoints, the same for all ranks.
            config_text: The run's redacted configuration, kept with each checkpoint.
            ranks: All processes of the job; None: this one is alone.
            data_rank: This rank's place among those that see different data; None: its rank in the job.
            is_node_leader: Whether this process flushes to the disk what its machine has written; one per machine
                suffices.
        """
        self.root = root
        self._config = config
        self._config_text = config_text
        self._ranks = ranks or RankGroup()
        self._data_rank = self._ranks.rank if data_rank is None else data_rank
        self._is_node_leader = is_node_leader
        self._lock: FolderLock | None = None

    def open(self) -> None:
        """Make the folder, keep other jobs out of it until `close`, and settle what a killed save left half replaced.

        Raises:
            OSError: it cannot be made or written, or this rank does not see it.
            FolderBusyError: another job saves its checkpoints there.
            PeerError: one of these happened on another rank.
        """
        try:
            with self._ranks.together():
                if self._ranks.is_main:
                    self._lock = FolderLock(self.root)
                    settle_replacements(self.root)
            self._check_seen(self.root)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other jobs save in the folder."""
        if self._lock is not None:
            self._lock.close()

    def find_resumable(self, model: nn.Module) -> Path | None:
        """Return the checkpoint that the run should start from, or None for a fresh start; rank zero decides.

        The recipe's restore_from decides; without it, the newest complete checkpoint of the same model. A newer one of
        another model is passed over with a warning.

        Raises:
            FileNotFoundError, RuntimeError: restore_from names no usable checkpoint.
            ValueError: the newest one is of a newer format, or its manifest is damaged.
            PeerError: one of these happened on rank zero, and this is another one.
        """
        with self._ranks.together():
            found = self._find(model) if self._ranks.is_main else None
        return self._ranks.broadcast(found)

    def _find(self, model: nn.Module) -> Path | None:
        if self._config.restore_from is not None:
            return resolve_restore_from_to_checkpoint_dir(self.root, self._config.restore_from)
        newest = find_latest_checkpoint(self.root)
        others = [path for path in reversed(find_complete_checkpoints(self.root)) if path != newest]
        for path in [newest, *others] if newest is not None else []:
            if _holds(path, model):
                return path
            logger.warning("%s holds another model and is not resumed", path)
        return None

    def restore(self, checkpoint: Path, state: RunState) -> None:
        """Load a checkpoint into the objects of a run, saved by as many ranks as now or by another number.

        Ranks that the checkpoint has no random state of are seeded from that of rank zero.

        Raises:
            ValueError: it holds another model, does not fit the data, batch size or optimizer, is damaged, or is of a
                newer format; on every rank, whichever found that.
        """
        try:
            with self._ranks.together():
                manifest = read_manifest(checkpoint)
                if not _holds(checkpoint, state.model):
                    other = manifest["model_class"]
                    raise ValueError(
                        f"{checkpoint} holds another model (a {other}) than the one that the recipe builds"
                    )
            self._load_parts(checkpoint, state, saved_ranks=manifest["ranks"])
        except _LOAD_ERRORS as error:
            _reraise_interrupt(error)
            raise ValueError(
                f"the checkpoint {checkpoint} cannot be restored: {self._reason(error)}; if the recipe was not changed "
                "it is damaged: remove it, or name another one with checkpoint.restore_from"
            ) from error

    def _load_parts(self, checkpoint: Path, state: RunState, *, saved_ranks: int) -> None:
        ranks = self._ranks
        with ranks.together():
            # First what may refuse the checkpoint: other data, another batch size.
            state.step_scheduler.load_state_dict(_load(checkpoint / "step_scheduler.pt"))
            # The position is that of the whole job, the same in every file.
            position = checkpoint / f"dataloader/dataloader_dp_rank_{self._data_rank}.pt"
            position = position if position.is_file() else position.with_name("dataloader_dp_rank_0.pt")
            state.dataloader.load_state_dict(_load(position))
        tensors.load_model(state.model, checkpoint / "model", ranks=ranks)
        tensors.load_optimizer(state.model, state.optimizer, checkpoint / "optim", ranks=ranks)
        with ranks.together():
            # The random state last: nothing that runs after it may draw numbers.
            if ranks.rank < saved_ranks:
                state.rng.load_state_dict(_load(checkpoint / f"rng/rng_global_rank_{ranks.rank}.pt"))
            else:
                state.rng.load_state_of_rank_zero(_load(checkpoint / "rng/rng_global_rank_0.pt"), rank=ranks.rank)
        if ranks.is_main and ranks.size > saved_ranks:
            logger.info(
                "%s was saved by %d rank(s) and is restored on %d: the additional ones draw new random numbers",
                checkpoint,
                saved_ranks,
                ranks.size,
            )

    def save(self, state: RunState, *, losses: Mapping[str, float], final: bool) -> Path:
        """Write a checkpoint of the step that just ran, point LATEST (and LOWEST_VAL) to it, and drop old ones.

        A complete checkpoint of the same step is replaced only when the new one is on the disk, which needs room for
        both.

        Args:
            state: The run.
            losses: Metrics of this step, such as `train_loss` and `val_loss`; kept in losses.json.
            final: Whether this is the run's last checkpoint.

        Raises:
            CheckpointSaveError: the disk is full or another write failed, on whichever rank; every rank raises it, and
                earlier checkpoints are untouched.
        """
        ranks = self._ranks
        scheduler = state.step_scheduler.state_dict()
        directory = self.root / checkpoint_name(epoch=scheduler["epoch"], step=scheduler["step"])
        try:
            with ranks.together():
                place = self._make_room(directory, state.model) if ranks.is_main else directory
            # The name only: a rank that is told another folder must find out.
            place = self.root / ranks.broadcast(place.name)
            self._check_seen(place)
            self._write(place, state, losses=losses, final=final)
            with ranks.together():
                if self._is_node_leader:
                    _sync_tree(place)
            # Every rank's part is on the disk; only now may the checkpoint look like one.
            with ranks.together():
                if ranks.is_main:
                    clear_checkpoint_incomplete(place)
                    if place != directory:
                        put_in_place(directory)
                    point_to(directory, LATEST)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            _reraise_interrupt(error)
            raise CheckpointSaveError(
                f"the checkpoint {directory} could not be written: {self._reason(error)}; "
                f"the last good checkpoint is {self._last_good()}"
            ) from error
        if ranks.is_main:
            self._tidy(directory, state.model, losses)
        return directory

    def _tidy(self, saved: Path, model: nn.Module, losses: Mapping[str, float]) -> None:
        """Do what follows a save that is good already: move the other pointer and remove old checkpoints."""
        keep = self._config.max_recent_checkpoints
        try:
            follow_lowest(saved, losses, key=self._config.best_metric_key)
            drop_replaced(saved)
            if keep is not None:
                prune_checkpoints(self.root, keep=keep, is_ours=lambda path: _may_replace(path, model))
        except OSError as error:
            logger.warning(
                "%s is saved, but %s or older checkpoints could not be updated: %s", saved, LOWEST_VAL, error
            )

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of those in this folder, rather than a copy or one of another run."""
        mine = False
        with self._ranks.together():
            if self._ranks.is_main:
                mine = checkpoint.resolve() in [path.resolve() for path in list_automodel_checkpoints(self.root)]
        return self._ranks.broadcast(mine)

    def update_losses(self, checkpoint: Path, losses: Mapping[str, float]) -> None:
        """Add metrics to those of a complete checkpoint in this folder, in one step, and let LOWEST_VAL follow them.

        Args:
            checkpoint: One that `holds` is true for.
            losses: Metrics of its step; they replace those of the same names.

        Raises:
            CheckpointSaveError: the file or the pointer could not be written, on every rank; the checkpoint is as good
                as before.
        """
        # Under the name that a pointer can have, however the caller came to the checkpoint.
        directory = self.root / checkpoint.resolve().name
        try:
            with self._ranks.together():
                if self._ranks.is_main:
                    merged = {**read_losses(directory), **losses}
                    replace_losses(merged, directory)
                    follow_lowest(directory, merged, key=self._config.best_metric_key)
        except (OSError, PeerError) as error:
            raise CheckpointSaveError(f"{directory / LOSSES} could not be updated: {self._reason(error)}") from error

    def _check_seen(self, folder: Path) -> None:
        """Check that all ranks see a folder that rank zero made; on one that does not, its part would be lost.

        Raises:
            FileNotFoundError: this rank does not see it; `PeerError` where another one does not.
        """
        with self._ranks.together():
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"the folder {folder}, which rank 0 made, is not there: checkpoint.checkpoint_dir must be on a "
                    "filesystem that all ranks share"
                )

    def _last_good(self) -> str:
        try:
            last = find_latest_checkpoint(self.root)
        except OSError as error:
            return f"unknown ({error})"
        return "none" if last is None else str(last)

    def _make_room(self, directory: Path, model: nn.Module) -> Path:
        """Make an empty, marked directory to write a checkpoint in, and return it.

        It is `directory` itself unless a complete checkpoint stands there, which is kept until the new one is complete
        too; one of another model is moved aside for good.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        settle_replacements(self.root)
        place = directory
        if directory.is_dir() and not is_checkpoint_incomplete(directory):
            if _may_replace(directory, model):
                place = replacement_of(directory)
            else:
                aside = _free_name(directory)
                logger.warning("%s is not a checkpoint of this model; it is kept as %s", directory, aside.name)
                directory.rename(aside)
        place.mkdir(exist_ok=True)
        mark_checkpoint_incomplete(place)
        sync_directory(self.root)
        for entry in place.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif not entry.name.startswith("."):
                entry.unlink()
        return place

    def _write(self, directory: Path, state: RunState, *, losses: Mapping[str, float], final: bool) -> None:
        """Write everything, but leave the directory marked."""
        ranks = self._ranks
        tensors.save_model(state.model, directory / "model", ranks=ranks)
        tensors.save_optimizer(state.model, state.optimizer, directory / "optim", ranks=ranks)
        consolidated = None
        if self._config.wants_consolidated(final=final) and hasattr(state.model, "save_pretrained"):
            consolidated = tensors.gather_model(state.model, ranks=ranks)
        with ranks.together():
            _save(state.rng.state_dict(), directory / f"rng/rng_global_rank_{ranks.rank}.pt")
            _save(state.dataloader.state_dict(), directory / f"dataloader/dataloader_dp_rank_{self._data_rank}.pt")
            if ranks.is_main:
                self._write_common(directory, state, losses=losses, consolidated=consolidated)

    def _write_common(
        self,
        directory: Path,
        state: RunState,
        *,
        losses: Mapping[str, float],
        consolidated: Mapping[str, Tensor] | None,
    ) -> None:
        """Write what there is once per job, the manifest last."""
        if consolidated is not None:
            folder = directory / "model" / "consolidated"
            save_for_transformers(state.model, state.tokenizer, folder, state_dict=consolidated)
        scheduler = state.step_scheduler.state_dict()
        _save(scheduler, directory / "step_scheduler.pt")
        (directory / "config.yaml").write_text(self._config_text, encoding="utf-8")
        write_losses(losses, directory)
        manifest = make_manifest(
            step=scheduler["step"],
            epoch=scheduler["epoch"],
            ranks=self._ranks.size,
            model_class=tensors.model_class_name(state.model),
            model_signature=tensors.model_signature(state.model),
            torch_version=torch.__version__,
        )
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    def _reason(self, error: BaseException) -> str:
        """What went wrong, in a line, and on which rank if there are several."""
        if isinstance(error, PeerError):
            return str(error)
        rank = self._ranks.rank
        if isinstance(error, CheckpointException) and error.failures:
            # PyTorch wraps the error of a rank in one that quotes its whole traceback.
            rank, (error, _) = next(iter(error.failures.items()))
        text = str(error) or type(error).__name__
        return text if self._ranks.size == 1 else f"rank {rank} failed: {type(error).__name__}: {text}"


def _reraise_interrupt(error: BaseException) -> None:
    """Raise the KeyboardInterrupt that PyTorch wrapped, if it is one."""
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            if isinstance(inner, KeyboardInterrupt):
                raise inner


def _holds(checkpoint: Path, model: nn.Module) -> bool:
    return bool(read_manifest(checkpoint)["model_signature"] == tensors.model_signature(model))


def _may_replace(checkpoint: Path, model: nn.Module) -> bool:
    """Whether a complete checkpoint is one of this model, so that the run may overwrite or remove it."""
    try:
        return _holds(checkpoint, model)
    except (OSError, ValueError) as error:
        logger.warning("%s is left alone: %s", checkpoint, error)
        return False


def _free_name(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.other-{number}")).exists():
        number += 1
    return aside


def _save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # By way of memory: PyTorch's own writer does not tell why it could not write.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


def _load(path: Path) -> dict[str, Any]:
    with tensors.reading(path):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))
    sync_directory(root.parent)
