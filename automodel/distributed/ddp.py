"""Data parallelism with whole replicas: torch's DistributedDataParallel averages the gradients."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automodel.distributed.mesh import Mesh

__all__ = ["Ddp"]


class Ddp:
    """Every rank holds the whole model; see `strategy.Strategy`."""

    shards_parameters = False

    def __init__(self, *, mesh: Mesh, device: torch.device, dtype: torch.dtype, defer_sync: bool) -> None:
        """Replicate over the mesh's data ranks.

        Args:
            mesh: The ranks.
            device: Where this rank computes.
            dtype: The dtype of autocast; float32: none.
            defer_sync: Average the gradients once per step, not after every pass.
        """
        self.averages_over = mesh.sizes.data
        self.autocast_dtype = dtype
        self._mesh = mesh
        self._device = device
        self._defer_sync = defer_sync

    def shard(self, model: nn.Module) -> nn.Module:
        """Wrap the model; rank zero's parameters and buffers are sent to the others."""
        return DistributedDataParallel(
            model.to(self._device),
            device_ids=[self._device] if self._device.type == "cuda" else None,
            process_group=self._mesh.replicate_group,
            # Buffers of language models are constants.
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )

    def materialize(self, model: nn.Module) -> None:
        """Give a model on the meta device memory."""
        model.to_empty(device=self._device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: the optimizer works on the parameters as they are."""

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Average the gradients in the last backward pass of a step only, or in each."""
        if is_last or not self._defer_sync:
            return nullcontext()
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync()
