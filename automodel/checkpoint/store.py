"""Saving and restoring a run: one directory per checkpoint, in the layout that users of the reference system know.

epoch_<E>_step_<S>/
  checkpoint.json (format, version, step, epoch, model signature)  config.yaml (redacted)  losses.json
  model/shard-*.safetensors  model/consolidated/ (readable by transformers)  optim/ (DCP)
  step_scheduler.pt  rng/rng_global_rank_<R>.pt  dataloader/dataloader_dp_rank_<R>.pt
"""

import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError
from torch import nn
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
    mark_checkpoint_incomplete,
    point_to,
    read_checkpoint_pointer,
    resolve_restore_from_to_checkpoint_dir,
    sync_directory,
)
from automodel.checkpoint.retention import prune_checkpoints
from automodel.config.sections import refuse, setting
from automodel.models.export import save_for_transformers

__all__ = ["FORMAT_VERSION", "CheckpointConfig", "CheckpointSaveError", "Checkpointer", "RunState"]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

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


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that a checkpoint carries of a run on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_scheduler: _Stateful
    rng: _Stateful
    dataloader: _Stateful
    tokenizer: Any = None


class Checkpointer:
    """Saves, finds and restores the checkpoints in one folder."""

    def __init__(self, config: CheckpointConfig, *, root: Path, config_text: str, rank: int = 0) -> None:
        """Use the folder `root`, which need not exist yet.

        Args:
            config: The recipe section.
            root: Folder of the checkpoints.
            config_text: The run's redacted configuration, kept with each checkpoint.
            rank: This process's rank.
        """
        self.root = root
        self._config = config
        self._config_text = config_text
        self._rank = rank
        self._lock: FolderLock | None = None

    def open(self) -> None:
        """Make the folder and keep other processes out of it until `close`.

        Raises:
            OSError: it cannot be made or written.
            FolderBusyError: another process saves its checkpoints there.
        """
        self._lock = FolderLock(self.root)

    def close(self) -> None:
        """Let other processes save in the folder."""
        if self._lock is not None:
            self._lock.close()

    def find_resumable(self, model: nn.Module) -> Path | None:
        """Return the checkpoint that the run should start from, or None for a fresh start.

        The recipe's restore_from decides; without it, the newest complete checkpoint of the same model. A newer one of
        another model is passed over with a warning.

        Raises:
            FileNotFoundError, RuntimeError: restore_from names no usable checkpoint.
        """
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
        """Load a checkpoint into the objects of a run.

        Raises:
            ValueError: it holds another model, does not fit the data, batch size or optimizer, is damaged, or is of a
                newer format.
        """
        if not _holds(checkpoint, state.model):
            other = _read_manifest(checkpoint)["model_class"]
            raise ValueError(f"{checkpoint} holds another model (a {other}) than the one that the recipe builds")
        try:
            self._load_parts(checkpoint, state)
        except _LOAD_ERRORS as error:
            raise ValueError(
                f"the checkpoint {checkpoint} cannot be restored: {_reason(error)}; if the recipe was not changed it "
                "is damaged: remove it, or name another one with checkpoint.restore_from"
            ) from error

    def _load_parts(self, checkpoint: Path, state: RunState) -> None:
        # First what may refuse the checkpoint: other data, another batch size.
        state.step_scheduler.load_state_dict(_load(checkpoint / "step_scheduler.pt"))
        state.dataloader.load_state_dict(_load(checkpoint / f"dataloader/dataloader_dp_rank_{self._rank}.pt"))
        tensors.load_model(state.model, checkpoint / "model")
        tensors.load_optimizer(state.model, state.optimizer, checkpoint / "optim")
        # The random state last: nothing that runs after it may draw numbers.
        state.rng.load_state_dict(_load(checkpoint / f"rng/rng_global_rank_{self._rank}.pt"))

    def save(self, state: RunState, *, losses: Mapping[str, float], final: bool) -> Path:
        """Write a checkpoint of the step that just ran, point LATEST (and LOWEST_VAL) to it, and drop old ones.

        Args:
            state: The run.
            losses: Metrics of this step, such as `train_loss` and `val_loss`; kept in losses.json.
            final: Whether this is the run's last checkpoint.

        Raises:
            CheckpointSaveError: the disk is full or another write failed; earlier checkpoints are untouched.
        """
        scheduler = state.step_scheduler.state_dict()
        directory = self.root / checkpoint_name(epoch=scheduler["epoch"], step=scheduler["step"])
        try:
            self._make_room(directory, state.model)
            self._write(directory, state, losses=losses, final=final)
            point_to(directory, LATEST)
            self._follow_lowest(directory, losses)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            _reraise_interrupt(error)
            last = find_latest_checkpoint(self.root) if self.root.is_dir() else None
            raise CheckpointSaveError(
                f"the checkpoint {directory} could not be written: {_reason(error)}; "
                f"the last good checkpoint is {last if last is not None else 'none'}"
            ) from error
        keep = self._config.max_recent_checkpoints
        if keep is not None:
            prune_checkpoints(self.root, keep=keep, is_ours=lambda path: _may_replace(path, state.model))
        return directory

    def _make_room(self, directory: Path, model: nn.Module) -> None:
        """Make an empty, marked directory; a complete checkpoint of another model that stands there is moved aside."""
        self.root.mkdir(parents=True, exist_ok=True)
        if directory.is_dir() and not is_checkpoint_incomplete(directory) and not _may_replace(directory, model):
            aside = _free_name(directory)
            logger.warning("%s holds another model; it is kept as %s", directory, aside.name)
            directory.rename(aside)
        directory.mkdir(exist_ok=True)
        mark_checkpoint_incomplete(directory)
        sync_directory(self.root)
        for entry in directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif not entry.name.startswith("."):
                entry.unlink()

    def _write(self, directory: Path, state: RunState, *, losses: Mapping[str, float], final: bool) -> None:
        tensors.save_model(state.model, directory / "model")
        tensors.save_optimizer(state.model, state.optimizer, directory / "optim")
        if self._config.wants_consolidated(final=final) and hasattr(state.model, "save_pretrained"):
            save_for_transformers(state.model, state.tokenizer, directory / "model" / "consolidated")
        scheduler = state.step_scheduler.state_dict()
        _save(state.rng.state_dict(), directory / f"rng/rng_global_rank_{self._rank}.pt")
        _save(state.dataloader.state_dict(), directory / f"dataloader/dataloader_dp_rank_{self._rank}.pt")
        _save(scheduler, directory / "step_scheduler.pt")
        (directory / "config.yaml").write_text(self._config_text, encoding="utf-8")
        _write_json(dict(losses), directory / "losses.json")
        manifest = {
            "format": "automodel-checkpoint",
            "version": FORMAT_VERSION,
            "step": scheduler["step"],
            "epoch": scheduler["epoch"],
            "model_class": type(state.model).__name__,
            "model_signature": tensors.model_signature(state.model),
            "torch": torch.__version__,
        }
        _write_json(manifest, directory / MANIFEST)
        _sync_tree(directory)
        clear_checkpoint_incomplete(directory)

    def _follow_lowest(self, directory: Path, losses: Mapping[str, float]) -> None:
        value = _metric(losses, self._config.best_metric_key)
        if not math.isfinite(value):
            return
        best = read_checkpoint_pointer(self.root, LOWEST_VAL)
        # The target is incomplete when a save over it was interrupted: its metric is gone then.
        if best is not None and best != directory and not is_checkpoint_incomplete(best):
            lowest = _metric(json.loads((best / "losses.json").read_text()), self._config.best_metric_key)
            if lowest <= value:
                return
        point_to(directory, LOWEST_VAL)


def _reraise_interrupt(error: BaseException) -> None:
    """Raise the KeyboardInterrupt that PyTorch wrapped, if it is one."""
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            if isinstance(inner, KeyboardInterrupt):
                raise inner


def _reason(error: BaseException) -> str:
    """What went wrong, in a line: PyTorch wraps the error of a rank in one that quotes its whole traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{checkpoint / MANIFEST} is damaged: {error}") from error
    if manifest["version"] > FORMAT_VERSION:
        raise ValueError(f"{checkpoint} has format version {manifest['version']}, newer than {FORMAT_VERSION}")
    return manifest


def _holds(checkpoint: Path, model: nn.Module) -> bool:
    return bool(_read_manifest(checkpoint)["model_signature"] == tensors.model_signature(model))


def _may_replace(checkpoint: Path, model: nn.Module) -> bool:
    """Whether a complete checkpoint is one of this model, so that the run may overwrite or remove it."""
    try:
        return _holds(checkpoint, model)
    except ValueError as error:
        logger.warning("%s is left alone: %s", checkpoint, error)
        return False


def _metric(losses: Mapping[str, float], key: str) -> float:
    """The metric of that name, else the validation loss; infinity where there is neither."""
    return losses.get(key, losses.get("val_loss", math.inf))


def _free_name(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.other-{number}")).exists():
        number += 1
    return aside


def _save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))
    sync_directory(root.parent)
