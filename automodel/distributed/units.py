"""Which modules of a model are sharded, gathered and freed together: the units of fully sharded data parallelism.

A unit is gathered before its forward pass and freed afterwards, so each should compute in one piece: every block of the
model, the input embedding and the output head. What is in none of them (the final norm) belongs to the root, which is
gathered first and freed last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

__all__ = ["Unit", "bytes_per_rank", "describe_units", "find_blocks", "find_units"]

UnitKind = Literal["part", "block", "embedding", "head", "root"]

_MOST_RANGES = 8  # of block numbers in one line


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module and the parameters that it manages itself, without those of units inside it.

    Args:
        name: The module's name in the model, "" for the root.
        module: The module to shard.
        kind: What the unit is in the model.
        parameters: Names in the model; one name for a parameter that has several.
        num_parameters: Elements.
        num_bytes: Bytes in the present dtypes, over all ranks.
    """

    name: str
    module: nn.Module
    kind: UnitKind
    parameters: tuple[str, ...]
    num_parameters: int
    num_bytes: int


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the model's blocks in order, with their names: the items of its outermost lists of modules.

    A list is an `nn.ModuleList`; items without parameters are no blocks, and an item that is itself a list or a dict of
    modules stands for its own items. Lists inside a block (experts) do not count. A model may have several lists
    (a vision tower and a language model). A module that is listed several times comes once.
    """
    seen: set[nn.Module] = set()
    return list(_walk_blocks(model, "", seen, in_list=False))


def find_units(model: nn.Module) -> list[Unit]:
    """Divide a model into units, in the order in which `fully_shard` must be called: the root comes last.

    Each block is a unit, and so are the input embedding and the output head, unless they share a parameter: tied ones
    stay with the root. A block that shares a parameter with a module outside it is none either. A model that does not
    say what its embedding and its head are has the first `nn.Embedding` outside the blocks for the one, and for the
    other an `nn.Linear` outside them that returns one value per row of that embedding.

    A unit is gathered as one tensor: a module inside it whose trainable parameters have another dtype than most, such
    as a router that stays in float32, is a unit of its own before it, of kind "part".

    Raises:
        ValueError: such a module holds parameters of several dtypes.
    """
    places = _places_of_parameters(model)
    blocks = find_blocks(model)
    embedding, head = _embedding_and_head(model, blocks)
    candidates: list[tuple[str, nn.Module, UnitKind]] = [(name, block, "block") for name, block in blocks]
    names = {module: name for name, module in model.named_modules()}
    in_blocks = {module for _, block in blocks for module in block.modules()}
    kinds: tuple[tuple[nn.Module | None, UnitKind], ...] = ((embedding, "embedding"), (head, "head"))
    for module, kind in kinds:
        if module is not None and module in names and module is not model and module not in in_blocks:
            candidates.append((names[module], module, kind))
    owned: set[str] = set()
    units = []
    for name, module, kind in candidates:
        mine = {f"{name}.{local_name}" for local_name, _ in module.named_parameters(remove_duplicate=False)}
        shares = any(not mine.issuperset(places[model.get_parameter(one)]) for one in mine)
        if not mine or shares or mine & owned:
            continue
        owned |= mine
        units += _split_by_dtype(_make_unit(module, name=name, kind=kind, skip=set()))
    units += _split_by_dtype(_make_unit(model, name="", kind="root", skip=owned))
    return units


def bytes_per_rank(part: Unit | nn.Module, *, shards: int) -> int:
    """Return the bytes of parameters that each rank holds, in their present dtypes, when they are sharded.

    FSDP2 cuts each parameter along its first dimension into `shards` parts of equally many rows; a rank whose part is
    smaller pads it, so that the largest part is what every rank holds.

    Args:
        part: A unit, or a whole model, whose tied parameters count once.
        shards: The ranks that share each parameter; 1: whole.

    Raises:
        ValueError: `shards` is not positive, or a parameter is a scalar, which FSDP2 cannot shard.
    """
    if shards < 1:
        raise ValueError(f"shards must be positive, got {shards}")
    parameters = _unit_parameters(part) if isinstance(part, Unit) else dict(part.named_parameters())
    total = 0
    for name, parameter in parameters.items():
        if parameter.ndim == 0 and shards > 1:
            raise ValueError(f"parameter {name} is a scalar, which FSDP2 cannot shard; it needs one dimension")
        rows = parameter.shape[0] if parameter.ndim else 1
        row_bytes = parameter.numel() // max(rows, 1) * parameter.element_size()
        total += -(-rows // shards) * row_bytes
    return total


def describe_units(units: Sequence[Unit], *, shards: int) -> list[str]:
    """Describe units for a terminal, one line each; equal blocks of one list share a line.

    Blocks are equal when their class and the names, shapes and dtypes of their parameters are. In a hybrid model equal
    blocks seldom follow each other, so they need not, and the line names the numbers of all of them.

    Args:
        units: Those of one model.
        shards: The ranks that share each parameter.

    Raises:
        ValueError: see `bytes_per_rank`.
    """
    folded: dict[object, list[Unit]] = {}
    for unit in units:
        parent, _, last = unit.name.rpartition(".")
        is_numbered = unit.kind == "block" and last.isdigit()
        key = (parent, type(unit.module), _signature(unit)) if is_numbered else unit.name
        folded.setdefault(key, []).append(unit)
    return [_describe_group(group, shards=shards) for group in folded.values()]


def _walk_blocks(
    module: nn.Module, path: str, seen: set[nn.Module], *, in_list: bool
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if in_list and not is_container:
            if child not in seen and next(child.parameters(), None) is not None:
                seen.add(child)
                yield child_path, child
        else:
            # A dict is a list's equal only as an item of one: elsewhere it names parts, and does not count them.
            inside = isinstance(child, nn.ModuleList) or (in_list and is_container)
            yield from _walk_blocks(child, child_path, seen, in_list=inside)


def _places_of_parameters(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Every name of each parameter."""
    places: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, set()).add(name)
    return places


def _embedding_and_head(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the output head: as the model says, else by their types."""
    said: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            said.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError):
            break
    if len(said) == 2:
        return said[0], said[1]
    inside = {module for _, block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    embedding = next((module for module in outside if isinstance(module, nn.Embedding)), None)
    rows = None if embedding is None else embedding.num_embeddings
    heads = [module for module in outside if isinstance(module, nn.Linear) and module.out_features == rows]
    return embedding, heads[-1] if heads else None


def _make_unit(module: nn.Module, *, name: str, kind: UnitKind, skip: set[str]) -> Unit:
    prefix = f"{name}." if name else ""
    own = {prefix + local_name: parameter for local_name, parameter in module.named_parameters()}
    own = {full_name: parameter for full_name, parameter in own.items() if full_name not in skip}
    return Unit(
        name=name,
        module=module,
        kind=kind,
        parameters=tuple(own),
        num_parameters=sum(parameter.numel() for parameter in own.values()),
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own.values()),
    )


def _split_by_dtype(unit: Unit) -> list[Unit]:
    """The unit without the modules of other dtypes in it, after those modules."""
    sizes: dict[torch.dtype, int] = {}
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, parameter in _unit_parameters(unit).items():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
            dtypes.setdefault(name.rpartition(".")[0], set()).add(parameter.dtype)
    if len(sizes) < 2:
        return [unit]
    most = max(sizes, key=lambda dtype: sizes[dtype])
    parts = []
    for owner in (name for name, found in dtypes.items() if found != {most}):
        module = unit.module.get_submodule(owner.removeprefix(unit.name).removeprefix("."))
        found = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        if len(found) > 1:
            raise ValueError(
                f"distributed.strategy fsdp2: {owner or 'the model'} holds trainable parameters of several dtypes "
                f"({', '.join(sorted(map(str, found)))}), which cannot be gathered together; set model.torch_dtype to "
                "float32, or use strategy ddp"
            )
        parts.append(_make_unit(module, name=owner, kind="part", skip=set()))
    skip = {name for part in parts for name in part.parameters}
    skip |= {f"{unit.name}.{name}".removeprefix(".") for name, _ in unit.module.named_parameters()}.difference(
        unit.parameters
    )
    return [*parts, _make_unit(unit.module, name=unit.name, kind=unit.kind, skip=skip)]


def _unit_parameters(unit: Unit) -> dict[str, nn.Parameter]:
    prefix = f"{unit.name}." if unit.name else ""
    return {name: unit.module.get_parameter(name.removeprefix(prefix)) for name in unit.parameters}


def _signature(unit: Unit) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """The parameters of a unit without their values and without the unit's name."""
    skipped = len(unit.name)
    return tuple(
        (name[skipped:], parameter.shape, parameter.dtype) for name, parameter in _unit_parameters(unit).items()
    )


def _describe_group(group: Sequence[Unit], *, shards: int) -> str:
    unit = group[0]
    size = _format_bytes(bytes_per_rank(unit, shards=shards))
    count = _format_count(unit.num_parameters)
    label = type(unit.module).__name__
    if len(group) == 1:
        place = {"block": unit.name, "root": "the rest"}.get(unit.kind, f"{unit.kind}, {unit.name}")
        return f"{label} ({place})  {count} parameters, {size} per rank"
    parent = unit.name.rpartition(".")[0]
    numbers = _format_ranges([int(member.name.rpartition(".")[2]) for member in group])
    return f"{len(group)} x {label} ({parent}.{numbers})  {count} parameters each, {size} per rank each"


def _format_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 0-2, 4, 6-11; many are shortened in the middle."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) > _MOST_RANGES:
        texts = [*texts[: _MOST_RANGES - 2], "...", texts[-1]]
    return ", ".join(texts)


def _format_count(value: float) -> str:
    for divisor, suffix in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * divisor:
            return f"{value / divisor:.3g}{suffix}"
    return f"{value:.0f}"


def _format_bytes(value: float) -> str:
    for divisor, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= 0.9995 * divisor:
            return f"{value / divisor:.1f} {suffix}"
    return f"{value:.0f} B"
