"""How the ranks of a job hold one model: one small file per strategy, one protocol, one place that chooses."""

import logging
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from automodel.distributed.activation_checkpointing import checkpoint_blocks
from automodel.distributed.block_compile import compile_blocks
from automodel.distributed.config import DistributedConfig
from automodel.distributed.ddp import Ddp
from automodel.distributed.fsdp2 import Fsdp2
from automodel.distributed.megatron_fsdp import MegatronFsdp
from automodel.distributed.mesh import Mesh
from automodel.distributed.single import Single
from automodel.distributed.units import find_blocks

__all__ = ["Strategy", "check_strategy", "make_strategy", "prepare_blocks"]

logger = logging.getLogger(__name__)


class Strategy(Protocol):
    """What a training job asks of a strategy.

    Attributes:
        shards_parameters: Whether a rank holds a part of each parameter, so that a model is built without memory and
            filled after it was sharded.
        averages_over: The ranks over which gradients come out of the backward pass averaged; 1: as computed.
        autocast_dtype: The dtype of autocast in the forward pass; float32: none.
    """

    @property
    def shards_parameters(self) -> bool: ...  # noqa: D102 - see the class

    @property
    def averages_over(self) -> int: ...  # noqa: D102

    @property
    def autocast_dtype(self) -> torch.dtype: ...  # noqa: D102

    def shard(self, model: nn.Module) -> nn.Module:
        """Make `model` one that the ranks hold together, in place; returns the module to call in training.

        Every rank calls it. The model may be on the meta device if `shards_parameters`.
        """
        ...

    def materialize(self, model: nn.Module) -> None:
        """Give a sharded model on the meta device memory for this rank's part, where the strategy keeps it."""
        ...

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer over the parameters of a sharded module one of this strategy, in place; before it steps."""
        ...

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward pass of a step; gradients are complete after the last one."""
        ...


def check_strategy(config: DistributedConfig, *, world_size: int) -> None:
    """Check that this machine can run the strategy, before any model is built.

    Raises:
        ValueError: the sizes do not fit the number of processes.
        ImportError: the strategy needs a package that is not installed.
        RuntimeError: it needs a device that is not here.
    """
    config.sizes(world_size)
    if world_size > 1 and config.strategy_name == "megatron_fsdp":
        MegatronFsdp.check_available()


def make_strategy(config: DistributedConfig, *, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Strategy:
    """Choose the strategy of a job; a single process holds its model whole, whatever the recipe says.

    Args:
        config: The recipe section.
        mesh: The ranks.
        device: Where this rank computes.
        dtype: The dtype of the computation; float32: that of the parameters.
    """
    ignored = config.ignored_options(mesh.world.size)
    if ignored and mesh.world.is_main:
        where = "in a single process" if mesh.world.size == 1 else f"with strategy {config.strategy_name} as it is set"
        logger.warning("no effect %s: %s", where, ", ".join(ignored))
    if mesh.world.size == 1:
        return Single(device=device, dtype=dtype)
    match config.strategy_name:
        case "fsdp2":
            return Fsdp2(config, mesh=mesh, device=device, dtype=dtype)
        case "ddp":
            return Ddp(mesh=mesh, device=device, dtype=dtype, defer_sync=config.defer_fsdp_grad_sync is not False)
        case "megatron_fsdp":
            return MegatronFsdp(config, mesh=mesh, device=device, dtype=dtype)


def prepare_blocks(model: nn.Module, config: DistributedConfig) -> None:
    """Recompute activations in the model's blocks and compile them, as the recipe asks; before it is sharded.

    Raises:
        ValueError: the recipe asks for either, and the model has no list of blocks.
    """
    mode, compiled = config.checkpointing_mode, bool(config.enable_compile)
    if mode is None and not compiled:
        return
    blocks = find_blocks(model)
    if not blocks:
        name = "activation_checkpointing" if mode is not None else "enable_compile"
        raise ValueError(f"distributed.{name}: {type(model).__name__} has no list of blocks to apply it to")
    if mode is not None:
        checkpoint_blocks(blocks, mode=mode)
    if compiled:
        compile_blocks(blocks)
