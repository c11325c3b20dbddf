"""Model and optimizer tensors on disk: safetensors shards and distributed-checkpoint files, through PyTorch's DCP."""

import hashlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from automodel.models.tied_weights import tied_parameters

__all__ = ["load_model", "load_optimizer", "model_signature", "save_model", "save_optimizer"]

logger = logging.getLogger(__name__)


def save_model(model: nn.Module, directory: Path) -> None:
    """Write the model's state dict as safetensors shards; a tied tensor is written once."""
    directory.mkdir(parents=True)
    with _single_process():
        writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
        # The format holds contiguous tensors only.
        state = {name: tensor.contiguous() for name, tensor in _untied_state(model)}
        dcp.save(state, storage_writer=writer, no_dist=True)


def load_model(model: nn.Module, directory: Path) -> None:
    """Read the shards that `save_model` wrote into the model's own tensors."""
    with _single_process():
        dcp.load(dict(_untied_state(model)), storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Write the optimizer's state, keyed by parameter names."""
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    with _single_process():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=True)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Read the state that `save_optimizer` wrote into an optimizer over the same parameters.

    The settings of its parameter groups are part of that state; those that differ from the present ones are logged.
    """
    state: dict[str, Any] = {"optim": get_optimizer_state_dict(model, optimizer)}
    before = [_settings(group) for group in optimizer.param_groups]
    with _single_process():
        dcp.load(state, storage_reader=dcp.FileSystemReader(str(directory)), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    for was, group in zip(before, optimizer.param_groups, strict=True):
        for name, value in _settings(group).items():
            if value != was.get(name, value):
                logger.warning("optimizer.%s: the checkpoint's %r holds, not %r", name, value, was[name])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and its rate, which the schedule sets anew for every step."""
    return {name: value for name, value in group.items() if name not in {"params", "lr"}}


def model_signature(model: nn.Module) -> str:
    """A digest of the model's class and of the names and shapes of its state: two equal ones can share a checkpoint."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(_untied_state(model)):
        digest.update(f"\n{name} {tuple(tensor.shape)}".encode())
    return digest.hexdigest()


def _untied_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    aliases = tied_parameters(model)
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in aliases)


@contextmanager
def _single_process() -> Iterator[None]:
    """Quiet the notice that DCP gives for a save without a process group, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
