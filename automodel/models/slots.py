"""The places in a model that hold its parameters and buffers, and the part of each that this rank holds."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from automodel.models.tied_weights import tied_parameters

__all__ = ["Slot", "copy_part", "is_sharded", "local_part", "model_slots", "slots_to_fill"]


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer of one module, which can be exchanged for another tensor."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor = self._table[self.key]
        assert tensor is not None
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor there; a parameter's place takes a parameter."""
        self._table[self.key] = tensor

    @property
    def _table(self) -> dict[str, torch.Tensor | None]:
        module = self.module
        return module._parameters if self.key in module._parameters else module._buffers  # type: ignore[return-value]


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer by its full name, under each of its names, buffers outside the state dict too."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            slots.update((prefix + key, Slot(module, key)) for key, tensor in table.items() if tensor is not None)
    return slots


def slots_to_fill(model: nn.Module, template: nn.Module) -> dict[str, Slot]:
    """The places of `model` that need values, each tensor once; tied tensors that came apart are tied again.

    Giving a model memory with `to_empty` makes a tensor of its own for each name, so the template decides what is tied.

    Args:
        model: The model to fill, whole or sharded.
        template: The same model on the meta device, whole.

    Returns:
        The places by name; of several names of a tensor the one that `tied_parameters` keeps.

    Raises:
        ValueError: the models have different tensors, a tensor of `model` has no memory, or tied ones were sharded
            apart.
    """
    slots, expected = model_slots(model), model_slots(template)
    if odd := sorted(slots.keys() ^ expected.keys()):
        raise ValueError(f"model and template have different parameters or buffers: {', '.join(odd[:5])}")
    tied = tied_parameters(template)
    for name, kept in tied.items():
        if slots[name].tensor is slots[kept].tensor:
            continue
        if isinstance(slots[name].tensor, DTensor):
            raise ValueError(f"{name} and {kept} are one tensor, but were sharded apart: they belong to one FSDP unit")
        slots[name].put(slots[kept].tensor)
    for name, slot in slots.items():
        if slot.tensor.shape != expected[name].tensor.shape:
            shapes = f"{tuple(slot.tensor.shape)} and {tuple(expected[name].tensor.shape)}"
            raise ValueError(f"model and template have different shapes of {name}: {shapes}")
        if slot.tensor.is_meta:
            raise ValueError(f"{name} has no memory: call to_empty(device=...) before filling the model")
    return {name: slot for name, slot in slots.items() if name not in tied}


def is_sharded(model: nn.Module) -> bool:
    """Whether the ranks hold the model's parameters together."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What this rank holds of a tensor, in the same memory, and where in the whole tensor it lies.

    Raises:
        ValueError: the ranks hold addends of the tensor, and no parts.
    """
    whole = tensor.detach()
    if not isinstance(whole, DTensor):
        return whole, tuple(slice(0, size) for size in whole.shape)
    if any(placement.is_partial() for placement in whole.placements):
        raise ValueError(f"a tensor with placements {whole.placements} has no part that can be set")
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    local: torch.Tensor = whole.to_local()
    return local, tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


@torch.no_grad()
def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a tensor, or this rank's part of it, from the whole value; dtype and device may differ."""
    local, where = local_part(target)
    if local.numel():
        local.copy_(whole[where])
