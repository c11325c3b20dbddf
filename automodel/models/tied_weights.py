"""Which entries of a model's state are one tensor under several names, and where its two embeddings are."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "INPUT_EMBEDDING_NAMES",
    "OUTPUT_EMBEDDING_NAMES",
    "EmbeddingWeight",
    "find_input_embedding",
    "find_output_embedding",
    "shares_memory",
    "storage_identity",
    "tensor_identity",
    "tied_parameters",
]

# Unlike a data pointer or a Python object, a weak reference tells storages apart on the meta device too, and its
# identity is not given to another storage while the reference lives.
_weak_reference: Callable[[torch.UntypedStorage], Hashable] = StorageWeakRef

# What models call the two modules, the more usual names first; `lm_head_norm` and the like are other modules.
INPUT_EMBEDDING_NAMES = (
    "embed_tokens",
    "wte",
    "embeddings",
    "embed_in",
    "word_embeddings",
    "tok_embeddings",
    "token_embedding",
    "embedding",
    "embed",
)
OUTPUT_EMBEDDING_NAMES = ("lm_head", "embed_out", "output_layer", "output_projection", "output", "head")


@dataclass(frozen=True, kw_only=True)
class EmbeddingWeight:
    """The weight of an input or output embedding.

    Attributes:
        name: Its full name in the model.
        weight: The parameter itself, [vocab, hidden] in a model that is as it should be.
        padding_idx: The row that stays zero because its token is padding; None where there is no such row.
    """

    name: str
    weight: torch.Tensor
    padding_idx: int | None = None


def find_input_embedding(model: torch.nn.Module) -> EmbeddingWeight | None:
    """Find the table from tokens to vectors: what `get_input_embeddings` gives, else a module with a usual name.

    Returns:
        The weight, or None where there is none.
    """
    return _embedding_of_getter(model, "get_input_embeddings") or next(
        _embeddings_of_names(model, INPUT_EMBEDDING_NAMES), None
    )


def find_output_embedding(model: torch.nn.Module) -> EmbeddingWeight | None:
    """Find the table from vectors to logits: what `get_output_embeddings` gives, else a module with a usual name.

    Of the modules with a usual name one that is as large as the input embedding goes first.

    Returns:
        The weight, which is that of the input embedding where the two are tied, or None where there is none.
    """
    found = _embedding_of_getter(model, "get_output_embeddings")
    if found is not None:
        return found
    candidates = list(_embeddings_of_names(model, OUTPUT_EMBEDDING_NAMES))
    embedding = find_input_embedding(model)
    alike = (other for other in candidates if embedding is not None and other.weight.shape == embedding.weight.shape)
    return next(alike, next(iter(candidates), None))


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one of two tensors can change the other.

    The local shards decide for DTensors; empty ones share nothing.
    """
    first, second = _local(tensor), _local(other)
    if storage_identity(first) != storage_identity(second):
        return False
    (start, end), (other_start, other_end) = _byte_range(first), _byte_range(second)
    return start < other_end and other_start < end


def storage_identity(tensor: torch.Tensor) -> Hashable:
    """A key that two tensors share exactly when they live in the same storage, on any device."""
    return _weak_reference(tensor.untyped_storage())


def tensor_identity(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """A key that two tensors share exactly when they are the same elements of the same storage.

    The local shard decides for DTensors.
    """
    local = _local(tensor)
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


def _embedding_of_getter(model: torch.nn.Module, getter: str) -> EmbeddingWeight | None:
    """The weight of the module that a method of the model returns; it must be registered in the model."""
    method = getattr(model, getter, None)
    try:
        module = method() if method is not None else None
    except NotImplementedError:
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    paths = [path for path, other in model.named_modules(remove_duplicate=False) if other is module]
    names = [name for name, tensor in _named_tensors(model) if tensor is weight]
    # A tied weight has several names; that of the module itself says most.
    own = [name for name in names if name.removesuffix("weight").removesuffix(".") in paths]
    if not names:
        return None
    return EmbeddingWeight(name=(own or names)[0], weight=weight, padding_idx=getattr(module, "padding_idx", None))


def _embeddings_of_names(model: torch.nn.Module, usual: Sequence[str]) -> Iterator[EmbeddingWeight]:
    """The weights of the modules with a usual name: in the order of those names, then outer modules first.

    Weights of two dimensions go before all others. Modules inside numbered blocks are none of them, nor are those whose
    weight is computed from others and not registered.
    """
    found = []
    registered = {id(tensor) for _, tensor in _named_tensors(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        *above, last = path.split(".")
        if last not in usual or any(part.isdigit() for part in above):
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or id(weight) not in registered:
            continue
        padding_idx = getattr(module, "padding_idx", None)
        embedding = EmbeddingWeight(name=f"{path}.weight", weight=weight, padding_idx=padding_idx)
        found.append((weight.ndim != 2, usual.index(last), len(above), embedding))
    yield from (embedding for *_, embedding in sorted(found, key=lambda entry: entry[:3]))


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last; that is 0 for an empty tensor."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return start, 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(steps) + 1) * tensor.element_size()
