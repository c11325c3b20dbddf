"""Fully sharded data parallelism: torch's `fully_shard` (FSDP2) over units of the model, HSDP with several replicas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from automodel.distributed.config import DistributedConfig
from automodel.distributed.mesh import Mesh
from automodel.distributed.units import find_units

__all__ = ["Fsdp2", "parse_policy_dtype"]

_POLICY_OF_PARTS = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)

_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Fsdp2:
    """Every rank holds a part of each parameter, gradient and optimizer state; see `strategy.Strategy`."""

    shards_parameters = True
    # The policy casts what the units compute with; autocast on top of it would only add casts.
    autocast_dtype = torch.float32

    def __init__(self, config: DistributedConfig, *, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> None:
        """Shard over the mesh.

        Args:
            config: The recipe section.
            mesh: The ranks; with dp_replicate > 1 parameters are sharded within each replica (HSDP).
            device: Where this rank computes.
            dtype: The dtype of the computation; float32: that of the parameters.
        """
        self.averages_over = mesh.sizes.data
        self._config = config
        self._mesh = mesh
        self._device = device
        policy = config.mp_policy
        self._mp_policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=parse_policy_dtype(policy.reduce_dtype) or torch.float32,
            output_dtype=parse_policy_dtype(policy.output_dtype),
            cast_forward_inputs=policy.cast_forward_inputs,
        )
        offloading = config.offloading
        self._offloads = offloading is not None
        self._offload_policy = (
            OffloadPolicy()
            if offloading is None
            else CPUOffloadPolicy(pin_memory=offloading.pin_memory and device.type == "cuda")
        )
        self._defer_sync = config.defer_fsdp_grad_sync is not False

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard the units of `units.find_units`, the root last; a model with values is that of rank zero on every rank.

        Raises:
            ValueError: FSDP2 cannot shard a parameter, or not together with another one; the message names it.
        """
        units = find_units(model)
        _check_parameters(model)
        self._mesh.world.broadcast_tensors(_tensors_with_values(model))
        for unit in units:
            reshard = self._config.reshard_after_forward if unit.kind == "block" else None
            # A part keeps the dtype that sets it apart.
            policy = _POLICY_OF_PARTS if unit.kind == "part" else self._mp_policy
            self._fully_shard(unit.module, policy=policy, reshard_after_forward=reshard)
        if self._config.enable_fsdp2_prefetch:
            _prefetch(
                [unit.module for unit in units if unit.kind == "block"],
                forward_depth=self._config.fsdp2_forward_prefetch_depth or 1,
                backward_depth=self._config.fsdp2_backward_prefetch_depth or 1,
            )
        return model

    def materialize(self, model: nn.Module) -> None:
        """Give this rank's shards memory: on the device, or on the CPU where parameters are offloaded."""
        model.to_empty(device="cpu" if self._offloads else self._device)
        if self._offloads and self._device.type != "cpu":
            # Buffers are used where the computation is.
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty_like(buffer, device=self._device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: the optimizer works on the parameters as they are."""

    @contextmanager
    def micro_batch(self, module: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Reduce the gradients in the last backward pass of a step only, or in each."""
        assert isinstance(module, FSDPModule)
        module.set_is_last_backward(is_last)
        module.set_requires_gradient_sync(is_last or not self._defer_sync)
        yield

    def _fully_shard(
        self, module: nn.Module, *, policy: MixedPrecisionPolicy, reshard_after_forward: bool | None
    ) -> None:
        fully_shard(
            module,
            mesh=self._mesh.fsdp_mesh(),
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=self._offload_policy,
        )


def parse_policy_dtype(value: str | None) -> torch.dtype | None:
    """Read a dtype of `distributed.mp_policy`, whose section has checked the name."""
    if value is None:
        return None
    short = value.removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, _DTYPE_ALIASES.get(short, short))
    return dtype


def _check_parameters(model: nn.Module) -> None:
    """Refuse what FSDP2 cannot shard, before anything is.

    Raises:
        ValueError: a parameter is a scalar or not contiguous.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ValueError(
                f"distributed.strategy fsdp2: parameter {name} is a scalar, which cannot be sharded; use ddp"
            )
        if not parameter.is_contiguous():
            raise ValueError(f"distributed.strategy fsdp2: parameter {name} is not contiguous; use ddp")


def _tensors_with_values(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that are not on the meta device, each once."""
    tensors = (*model.parameters(), *model.buffers())
    return [tensor.detach() for tensor in tensors if not tensor.is_meta]


def _prefetch(blocks: Sequence[nn.Module], *, forward_depth: int, backward_depth: int) -> None:
    """Gather the blocks that come after the one that computes, in both directions."""
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(_fsdp_modules(blocks[index + 1 : index + 1 + forward_depth]))
        before = blocks[max(index - backward_depth, 0) : index]
        block.set_modules_to_backward_prefetch(_fsdp_modules(before[::-1]))


def _fsdp_modules(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
