"""The strategy megatron_fsdp: an adapter to the package megatron-fsdp, which is imported only where it is used."""

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from automodel.distributed.config import DistributedConfig
from automodel.distributed.fsdp2 import parse_policy_dtype
from automodel.distributed.mesh import Mesh
from automodel.distributed.units import find_blocks, find_units

__all__ = ["MegatronFsdp"]

_PACKAGE = "megatron_fsdp"


class MegatronFsdp:
    """Parameters, gradients and optimizer state sharded by megatron-fsdp; see `strategy.Strategy`.

    The model is whole until it is sharded. The package keeps float32 weights for the optimizer beside those that
    compute, so that the optimizer has to be handed over too: `shard_optimizer`.
    """

    # The package would fill a model on the meta device from its layers' own initialisation only.
    shards_parameters = False

    def __init__(self, config: DistributedConfig, *, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> None:
        """Shard over the mesh.

        Args:
            config: The recipe section.
            mesh: The ranks; with dp_replicate > 1 parameters are sharded within each replica (HSDP).
            device: Where this rank computes.
            dtype: The dtype of autocast; float32: none.

        Raises:
            ImportError: the package is not installed, or does not import.
            RuntimeError: there is no CUDA device.
        """
        self._package = _import_package()
        self.averages_over = mesh.sizes.data
        self.autocast_dtype = dtype
        self._mesh = mesh
        self._device = device
        reduce_dtype = parse_policy_dtype(config.mp_policy.reduce_dtype) or torch.float32
        self._mp_policy = self._package.MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=reduce_dtype
        )
        self._has_optimizer = False

    @staticmethod
    def check_available() -> None:
        """Check that the strategy can run here, before any model is built.

        Raises:
            ImportError: the package is not installed, or does not import.
            RuntimeError: there is no CUDA device.
        """
        _import_package()

    def shard(self, model: nn.Module) -> nn.Module:
        """Wrap a model with real parameters; its blocks are the package's units.

        Raises:
            ValueError: the model has no blocks that can be units.
        """
        classes = _unit_classes(model)
        if not classes:
            raise ValueError(
                f"distributed.strategy megatron_fsdp: {type(model).__name__} has no list of blocks with parameters of "
                "their own; use fsdp2"
            )
        is_hybrid = self._mesh.sizes.dp_replicate > 1
        sharded: nn.Module = self._package.fully_shard_model(
            module=model,
            device_mesh=self._mesh.devices if is_hybrid else self._mesh.fsdp_mesh(),
            dp_shard_dim="dp_shard",
            dp_outer_dim="dp_replicate" if is_hybrid else None,
            hybrid_fsdp_group=self._mesh.data.process_group if is_hybrid else None,
            fsdp_unit_modules=classes,
            device=self._device,
            mixed_precision_policy=self._mp_policy,
            # `micro_batch` says when to wait for the gradients.
            sync_model_each_microbatch=False,
        )
        return sharded

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's steps reach the weights that compute, in place.

        The optimizer is over the parameters of what `shard` returned.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        # The package runs one step, with gradients of zero: weight decay must not act in it.
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self._package.fully_shard_optimizer(optimizer)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._has_optimizer = True

    def materialize(self, model: nn.Module) -> None:
        """Give a model on the meta device memory; before it is sharded."""
        model.to_empty(device=self._device)

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Finish the gradients of a step in its last backward pass.

        Sharded gradients are reduced in every pass anyway; between replicas, and before the optimizer sees them, they
        are so in the last one only.

        Raises:
            RuntimeError: the optimizer was not handed over, so that its steps would change no weight.
        """
        if not self._has_optimizer:
            raise RuntimeError("distributed.strategy megatron_fsdp: shard_optimizer must be called before training")
        wrapper: Any = module
        # It stays so until the next micro-batch: the optimizer's step then knows that gradients are complete, and does
        # not take them from the package's buffers again, where they are not clipped.
        if wrapper.model_auto_sync != is_last:
            wrapper.set_model_auto_sync(is_last)
        return nullcontext()


def _import_package() -> ModuleType:
    """Import the package where it can run."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ImportError(
            "distributed.strategy megatron_fsdp needs the package megatron-fsdp: run `pip install megatron-fsdp`, or "
            "use fsdp2"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "distributed.strategy megatron_fsdp needs a CUDA device on every rank: the package megatron-fsdp runs its "
            "communication on CUDA streams; use fsdp2, which runs on CPUs too"
        )
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise ImportError(f"distributed.strategy megatron_fsdp: megatron-fsdp does not import: {error}") from error


def _unit_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of blocks that are units; the package takes every module of a class that it is given."""
    units = {unit.module for unit in find_units(model) if unit.kind == "block"}
    others = {type(block) for _, block in find_blocks(model) if block not in units}
    classes = {type(block): None for _, block in find_blocks(model) if block in units}
    return [kind for kind in classes if kind not in others]
