"""Model and optimizer tensors on disk: safetensors shards and distributed-checkpoint files, through PyTorch's DCP.

Each rank writes and reads its own part of sharded tensors; a tensor that all ranks hold is written once. What was
written by some number of ranks can be read by any other, bit by bit. All ranks call these functions together, and where
one of them fails all of them raise.
"""

import hashlib
import logging
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.futures import Future

from automodel.distributed.rank_group import RankGroup
from automodel.models.tied_weights import tied_parameters

__all__ = [
    "DamagedFileError",
    "gather_model",
    "load_model",
    "load_optimizer",
    "model_class_name",
    "model_signature",
    "reading",
    "save_model",
    "save_optimizer",
]

logger = logging.getLogger(__name__)


class DamagedFileError(RuntimeError):
    """A file of a checkpoint cannot be read, or is missing; the message names it."""


def save_model(model: nn.Module, directory: Path, *, ranks: RankGroup | None = None) -> None:
    """Write the model's state dict as safetensors shards; a tied tensor is written once.

    Args:
        model: The model, sharded over `ranks` or the same on all of them.
        directory: The folder, made where it does not exist; empty otherwise.
        ranks: The ranks that hold the model; None: this process alone.

    Raises:
        CheckpointException: a rank could not write; it holds that rank's error.
    """
    ranks = ranks or RankGroup()
    with ranks.together():
        # The format holds contiguous tensors only.
        state = {name: tensor.contiguous() for name, tensor in _untied_state(model)}
    _write(state, dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True), ranks=ranks)


def load_model(model: nn.Module, directory: Path, *, ranks: RankGroup | None = None) -> None:
    """Read the shards that `save_model` wrote into the model's own tensors.

    Raises:
        CheckpointException, DamagedFileError, PeerError: a shard cannot be read by some rank.
    """
    ranks = ranks or RankGroup()
    with ranks.together():
        state = dict(_untied_state(model))
    _read(state, _ShardReader(str(directory)), ranks=ranks)


def save_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, *, ranks: RankGroup | None = None
) -> None:
    """Write the optimizer's state, keyed by parameter names.

    Raises:
        CheckpointException: a rank could not write; it holds that rank's error.
    """
    ranks = ranks or RankGroup()
    with ranks.together():
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
    _write(state, _StateWriter(str(directory)), ranks=ranks)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, *, ranks: RankGroup | None = None
) -> None:
    """Read the state that `save_optimizer` wrote into an optimizer over the same parameters.

    The settings of its parameter groups are part of that state; those that differ from the present ones are logged.

    Raises:
        CheckpointException, DamagedFileError, PeerError: a file cannot be read by some rank.
    """
    ranks = ranks or RankGroup()
    with ranks.together():
        state: dict[str, Any] = {"optim": get_optimizer_state_dict(model, optimizer)}
    before = [_settings(group) for group in optimizer.param_groups]
    _read(state, _StateReader(str(directory)), ranks=ranks)
    with ranks.together():
        set_optimizer_state_dict(model, optimizer, state["optim"])
    if ranks.is_main:
        for was, group in zip(before, optimizer.param_groups, strict=True):
            for name, value in _settings(group).items():
                if value != was.get(name, value):
                    logger.warning("optimizer.%s: the checkpoint's %r holds, not %r", name, value, was[name])


def gather_model(model: nn.Module, *, ranks: RankGroup | None = None) -> dict[str, Tensor]:
    """Collect the model's state dict whole on rank zero: sharded tensors on the CPU, others as they are.

    A tied tensor appears under all of its names. The other ranks hold one whole tensor at a time, and get an empty
    dict.

    Raises:
        MemoryError, RuntimeError: rank zero has no room for it; `PeerError` on the other ranks.
    """
    ranks = ranks or RankGroup()
    whole: dict[str, Tensor] = {}
    failure: Exception | None = None
    for name, tensor in _untied_state(model):
        value = _whole(tensor) if isinstance(tensor, DTensor) else tensor
        if ranks.is_main and failure is None:
            try:
                whole[name] = value.cpu() if isinstance(tensor, DTensor) else value
            except (MemoryError, RuntimeError) as error:
                # It goes on gathering, since the others wait for it in every gather.
                failure = error
                whole.clear()
        del value
    with ranks.together():
        if failure is not None:
            raise failure
        if ranks.is_main:
            whole |= {alias: whole[name] for alias, name in tied_parameters(model).items()}
    return whole


def model_class_name(model: nn.Module) -> str:
    """The name of the model's class, whether it is sharded or not: FSDP2 puts a class of its own before it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def model_signature(model: nn.Module) -> str:
    """A digest of the model's class and of the names and shapes of its state: two equal ones can share a checkpoint.

    It does not depend on how the model is sharded.
    """
    digest = hashlib.sha256(model_class_name(model).encode())
    for name, tensor in sorted(_untied_state(model), key=lambda entry: entry[0]):
        digest.update(f"\n{name} {tuple(tensor.shape)}".encode())
    return digest.hexdigest()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Let errors of the body name the file that it reads.

    Raises:
        DamagedFileError: the body raised.
    """
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        raise DamagedFileError(text if str(file) in text else f"{file}: {text}") from error


class _StateWriter(dcp.FileSystemWriter):
    """A DCP writer that tells why it could not write: PyTorch's archives report a full disk as a wrong offset."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # Here, since what an error was caused by is lost on its way to the other ranks.
            failure = _write_failure(error, Path(self.path))
            raise failure from (None if failure is error else error)


def _write_failure(error: RuntimeError, folder: Path) -> Exception:
    """The operating system's error behind one of PyTorch's, if there is one; else the error, with what may be why."""
    cause: BaseException | None = error
    seen = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror or str(cause), str(folder))
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    if not any(writer in str(error) for writer in ("inline_container", "PytorchStreamWriter")):
        return error
    free = shutil.disk_usage(folder).free / 2**20
    return RuntimeError(f"{folder} could not be written: the disk may be full ({free:.1f} MiB are free): {error}")


class _StateReader(dcp.FileSystemReader):
    """A DCP reader that reads the metadata once, or is given them, and whose errors name the file."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = self.read_known(*args, **kwargs)
        return self.known

    def read_known(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata from the disk."""
        with reading(Path(self.path) / ".metadata"):
            return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            # DCP's shards have absolute paths, which stay as they are.
            file = Path(self.path) / self.storage_data[item.storage_index].relative_path
            per_file.setdefault(file, []).append(item)
        for file, items in per_file.items():
            with reading(file):
                super().read_data(replace(plan, items=items), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _ShardReader(_StateReader, dcp.HuggingFaceStorageReader):
    """The same for safetensors shards, whose headers are the metadata."""

    def read_known(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the headers of all shards, and check that they are all there."""
        for file in sorted(Path(self.path).glob("*.safetensors")):
            with reading(file), safe_open(file, framework="pt"):
                pass
        metadata = dcp.HuggingFaceStorageReader.read_metadata(self)
        for name, entry in metadata.state_dict_metadata.items():
            # Without this, the rows of a missing shard would keep what they held before, and nobody would be told.
            if isinstance(entry, TensorStorageMetadata):
                stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                if stored < math.prod(entry.size):
                    raise DamagedFileError(f"{self.path}: a shard is missing: it holds a part of {name} only")
        return metadata


def _write(state: dict[str, Any], writer: dcp.FileSystemWriter, *, ranks: RankGroup) -> None:
    group = ranks.process_group
    with _single_process():
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)


def _read(state: dict[str, Any], reader: _StateReader, *, ranks: RankGroup) -> None:
    # Rank zero alone reads the metadata: a job of n ranks has n shards, whose headers are n * n small reads otherwise.
    with ranks.together():
        if ranks.is_main:
            reader.read_metadata()
    reader.known = ranks.broadcast(reader.known)
    group = ranks.process_group
    with _single_process():
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)


def _whole(tensor: DTensor) -> Tensor:
    """Gather a sharded tensor on every rank; one that is kept on the CPU goes to the device of its mesh first."""
    moved = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    whole: Tensor = moved.full_tensor()
    return whole


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and its rate, which the schedule sets anew for every step."""
    return {name: value for name, value in group.items() if name not in {"params", "lr"}}


def _untied_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    aliases = tied_parameters(model)
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in aliases)


@contextmanager
def _single_process() -> Iterator[None]:
    """Quiet the notice that DCP gives for a save without a process group, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
