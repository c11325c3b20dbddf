"""One process: the model is whole, nothing is exchanged."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

__all__ = ["Single"]


class Single:
    """The strategy of a process that is alone; see `strategy.Strategy`."""

    shards_parameters = False
    averages_over = 1

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Compute on `device`, with autocast to `dtype` unless that is float32."""
        self.autocast_dtype = dtype
        self._device = device

    def shard(self, model: nn.Module) -> nn.Module:
        """Move the model to the device."""
        return model.to(self._device)

    def materialize(self, model: nn.Module) -> None:
        """Give a model on the meta device memory."""
        model.to_empty(device=self._device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: the optimizer works on the parameters as they are."""

    def micro_batch(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Nothing has to be kept from the others."""
        return nullcontext()
