"""Which entries of a model's state are one tensor under several names."""

from collections.abc import Callable, Hashable

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["storage_identity", "tensor_identity", "tied_parameters"]

# Unlike a data pointer or a Python object, a weak reference tells storages apart on the meta device too, and its
# identity is not given to another storage while the reference lives.
_weak_reference: Callable[[torch.UntypedStorage], Hashable] = StorageWeakRef


def storage_identity(tensor: torch.Tensor) -> Hashable:
    """A key that two tensors share exactly when they live in the same storage, on any device."""
    return _weak_reference(tensor.untyped_storage())


def tensor_identity(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """A key that two tensors share exactly when they are the same elements of the same storage.

    The local shard decides for DTensors.
    """
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return storage_identity(local), local.storage_offset(), tuple(local.shape), local.stride()


def tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Find the state-dict keys that name a tensor which another key already names.

    A checkpoint stores such a tensor once. Storage decides, and no list of tied names, so that it holds for every
    model and version. Empty tensors are never tied.

    Returns:
        Each redundant key and the key to keep: the input embedding where it is among them, else the first one.
    """
    kept: dict[tuple[Hashable, ...], str] = {}
    identities: dict[str, tuple[Hashable, ...]] = {}
    embedding_key = _input_embedding_key(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            continue
        identity = identities[name] = tensor_identity(tensor)
        if identity not in kept or name == embedding_key:
            kept[identity] = name
    return {name: kept[identity] for name, identity in identities.items() if kept[identity] != name}


def _input_embedding_key(model: torch.nn.Module) -> str | None:
    """The state-dict key of the input embedding, for models that say which module it is."""
    get_input_embeddings = getattr(model, "get_input_embeddings", None)
    if get_input_embeddings is None:
        return None
    embedding = get_input_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is embedding), None)
