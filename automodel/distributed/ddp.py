"""Data parallelism with whole replicas: torch's DistributedDataParallel averages the gradients."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automodel.distributed.mesh import Mesh

__all__ = ["Ddp", "UnusedParameterError"]


class UnusedParameterError(RuntimeError):
    """A trainable parameter had no part in a step's last backward pass, so that its gradient was not averaged."""


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
        """Wrap the model; rank zero's parameters and buffers are sent to the others, once."""
        model = model.to(self._device)
        # The wrapper's own exchange does not know every dtype.
        self._mesh.world.broadcast_tensors(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
        known = inspect.signature(DistributedDataParallel).parameters
        # Buffers of language models are constants.
        no_buffers: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        return DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            process_group=self._mesh.replicate_group,
            init_sync=False,
            gradient_as_bucket_view=True,
            **no_buffers,
        )

    def materialize(self, model: nn.Module) -> None:
        """Give a model on the meta device memory."""
        model.to_empty(device=self._device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: the optimizer works on the parameters as they are."""

    @contextmanager
    def micro_batch(self, module: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Average the gradients in the last backward pass of a step only, or in each.

        Raises:
            UnusedParameterError: a parameter had no part in a pass in which gradients are averaged.
        """
        assert isinstance(module, DistributedDataParallel)
        averages = is_last or not self._defer_sync
        with nullcontext() if averages else module.no_sync():
            yield
        if averages:
            try:
                # The wrapper itself finds out in the next forward pass, when the optimizer has stepped.
                module._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise UnusedParameterError(
                    "distributed.strategy ddp: a trainable parameter had no part in the last forward pass, so that "
                    "gradients could not be averaged; use strategy fsdp2, or freeze what is not used"
                ) from error
