"""Fresh weights that depend on a seed and on the names of the modules alone.

The values come from the model's own `_init_weights`, as in transformers. Each module draws from a seed of its own, so
that they are the same for every number of ranks, every way of sharding and every device, and for a part of the model as
for the whole. All of it happens on the CPU, one block of the model at a time.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as transformers_init

from automodel.models.slots import Slot, model_slots
from automodel.models.tied_weights import tied_parameters

__all__ = ["initialize"]

logger = logging.getLogger(__name__)

Store = Callable[[str, torch.Tensor], None]

# The group of modules around the blocks. Their own initialisation may change parameters of the modules inside.
_CONTAINERS = ""

# transformers' mark of a tensor that was loaded: its initialisation leaves such a tensor alone.
_LOADED = "_is_hf_initialized"


@dataclass(frozen=True)
class _Visit:
    """A module, its name, and the model whose `_init_weights` is responsible for it."""

    name: str
    module: nn.Module
    model: PreTrainedModel


def initialize(template: nn.Module, *, seed: int, store: Store, names: Collection[str] | None = None) -> None:
    """Compute initial values of a model's parameters and buffers and hand each to `store`.

    The random state of the process is not changed, nor is the template. A tied tensor is initialised once, by the
    module that `tied_parameters` keeps. Memory: one block or embedding, on the CPU; the whole model where the
    initialisation of an outer module changes parameters inside the blocks.

    Args:
        template: A transformers model on the meta device.
        seed: Any integer.
        store: Called as `store(name, value)`; the value is valid during the call only.
        names: The tensors to initialise, by the names that `tied_parameters` keeps; None: all. The others count as
            loaded.

    Raises:
        ValueError: the template is no transformers model, or its `_init_weights` fails or leaves a tensor without
            values.
    """
    if not isinstance(template, PreTrainedModel):
        raise ValueError(
            f"only transformers models can be initialised apart from their construction, got {_of(template)}"
        )
    tied = tied_parameters(template)
    slots = _distinct({name: slot for name, slot in model_slots(template).items() if name not in tied})
    wanted = {name: slot for name, slot in slots.items() if names is None or name in names}
    with _isolated(), _marked_loaded([slot.tensor for name, slot in slots.items() if name not in wanted]):
        for values in _values_by_group(list(_walk(template)), wanted, seed=seed):
            for name, value in values.items():
                store(name, value)


def _values_by_group(
    visits: list[_Visit], slots: Mapping[str, Slot], *, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    groups = _grouped(visits, slots)
    outer_visits, outer_slots = groups.pop(_CONTAINERS)
    inner = [slot.tensor for _, inner_slots in groups.values() for slot in inner_slots.values()]
    # The blocks have no memory while the modules around them are initialised, but they count what is written to them.
    before = [tensor._version for tensor in inner]
    try:
        values = _values(outer_visits, outer_slots, seed=seed)
        stands_alone = [tensor._version for tensor in inner] == before
    except ValueError:
        stands_alone = False
    if not stands_alone:
        logger.debug("%s initialises its blocks from outside: all is made at once", _of(visits[-1].module))
        yield _values(visits, slots, seed=seed)
        return
    yield values
    for inner_visits, inner_slots in groups.values():
        if inner_slots:
            yield _values(inner_visits, inner_slots, seed=seed)


def _values(visits: list[_Visit], slots: Mapping[str, Slot], *, seed: int) -> dict[str, torch.Tensor]:
    """Give the slots memory, initialise the modules, and put the old tensors back."""
    originals = {name: slot.tensor for name, slot in slots.items()}
    versions = {}
    try:
        for name, slot in slots.items():
            slot.put(_without_values(originals[name]))
            versions[name] = slot.tensor._version
        for visit in visits:
            torch.default_generator.manual_seed(_seed_of(visit.name, seed))
            _initialize_module(visit)
        for name, slot in slots.items():
            if _lacks_values(slot.tensor, version=versions[name]):
                raise ValueError(
                    f"{_of(visits[-1].model)} leaves {name} (of a {_of(slot.module)}) without values: "
                    "its _init_weights must set every parameter and buffer"
                )
        return {name: slot.tensor.detach() for name, slot in slots.items()}
    finally:
        for name, slot in slots.items():
            slot.put(originals[name])


def _initialize_module(visit: _Visit) -> None:
    try:
        visit.model._init_weights(visit.module)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ValueError(
            f"{_of(visit.model)}._init_weights cannot initialise {visit.name or 'the model'} (a {_of(visit.module)}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _walk(model: PreTrainedModel) -> Iterator[_Visit]:
    """Every module once, children first, with the innermost transformers model around it, as transformers does it."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, responsible: PreTrainedModel) -> Iterator[_Visit]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            yield from visit(path, child, child if isinstance(child, PreTrainedModel) else responsible)
        yield _Visit(name, module, responsible)

    yield from visit("", model, model)


def _grouped(visits: list[_Visit], slots: Mapping[str, Slot]) -> dict[str, tuple[list[_Visit], dict[str, Slot]]]:
    """Divide modules and slots into what needs memory at the same time.

    A group is an item of an outermost list of modules, or a module outside such lists that has no children (an
    embedding, the head), or all the modules around these.
    """
    names = {visit.name for visit in visits if isinstance(visit.module, nn.ModuleList)}
    groups: dict[str, tuple[list[_Visit], dict[str, Slot]]] = {}
    group_of: dict[int, str] = {}
    for visit in visits:
        group = _block_of(visit.name, names)
        if group is None:
            group = _CONTAINERS if any(True for _ in visit.module.children()) else visit.name
        group_of[id(visit.module)] = group
        groups.setdefault(group, ([], {}))[0].append(visit)
    for name, slot in slots.items():
        groups[group_of[id(slot.module)]][1][name] = slot
    return groups


def _block_of(name: str, lists: Collection[str]) -> str | None:
    """The name of the outermost list's item that a module is or lies in."""
    parts = name.split(".")
    for length in range(len(parts)):
        if ".".join(parts[:length]) in lists:
            return ".".join(parts[: length + 1])
    return None


def _distinct(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Each slot under its first name, where a module has several."""
    seen: set[tuple[int, str]] = set()
    distinct = {}
    for name, slot in slots.items():
        identity = (id(slot.module), slot.key)
        if identity not in seen:
            seen.add(identity)
            distinct[name] = slot
    return distinct


def _without_values(original: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU in whose values a missing initialisation shows."""
    empty = torch.empty_like(original, device="cpu", requires_grad=False)
    if empty.is_floating_point():
        empty.fill_(float("nan"))
    return nn.Parameter(empty, original.requires_grad) if isinstance(original, nn.Parameter) else empty


def _lacks_values(tensor: torch.Tensor, *, version: int) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point():
        # The sum tells in a tenth of the time; it may be NaN for infinities too.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    return tensor._version == version


def _seed_of(name: str, seed: int) -> int:
    """A seed of 63 bits for one module."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


@contextmanager
def _isolated() -> Iterator[None]:
    """Draw on the CPU, keep the process's random state, and let torch's own functions respect loaded tensors."""
    # Only the CPU's generator is seeded, so that of a GPU needs no saving.
    guard = transformers_init.guard_torch_init_functions()
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), guard:
        yield


@contextmanager
def _marked_loaded(tensors: list[torch.Tensor]) -> Iterator[None]:
    marked = [tensor for tensor in tensors if not hasattr(tensor, _LOADED)]
    for tensor in marked:
        setattr(tensor, _LOADED, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _LOADED)


def _of(module: nn.Module) -> str:
    return type(module).__name__
