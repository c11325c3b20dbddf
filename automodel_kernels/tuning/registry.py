"""The registry of operators: what tests, ahead-of-time compiling, benchmarks and prewarming need to know of each.

An operator's module registers it when it is imported. Nothing here imports an operator by itself; `load_all` does.
Numbers of bytes and operations are what the mathematics needs, not what a kernel happens to do.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from automodel_kernels.hardware import Target
    from automodel_kernels.tuning.autotune import Tuned
    from automodel_kernels.tuning.candidates import Candidates, Space

__all__ = ["Cost", "Example", "Kernel", "Launch", "Op", "Pointer", "get", "load_all", "register", "registered"]

_ops: dict[str, Op] = {}


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A tensor argument of a launch, without data.

    Attributes:
        dtype: of its elements.
        aligned: whether its address is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    aligned: bool = True


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel, without data and without the arguments that a configuration sets.

    Attributes:
        label: names it among the kernel's launches and in the table of resources, such as `bfloat16 unaligned`.
        dtype: chooses the candidates in the kernel's space.
        arguments: every other argument by name: a `Pointer` or a tensor (meta tensors do) for a tensor, and the
            very integers, floats, constexprs and None that a launch passes. Tensors are kept as pointers only.
    """

    label: str
    dtype: torch.dtype
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", {name: _without_data(each) for name, each in self.arguments.items()})


def _without_data(argument: object) -> object:
    if isinstance(argument, torch.dtype):
        return Pointer(dtype=argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    aligned = argument.device.type == "meta" or argument.data_ptr() % 16 == 0
    return Pointer(dtype=argument.dtype, aligned=aligned)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Triton kernel of an operator.

    Attributes:
        function: the `@tuned` function, whose jit function other processes find again under its module and name.
        launches: gives the launches that differ in their binary, the commonest first.
    """

    function: Tuned
    launches: Callable[[], Sequence[Launch]]

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function.__name__)

    @property
    def space(self) -> Space:
        """The function's configurations."""
        return self.function.space

    def claimed(self, target: Target) -> Iterator[tuple[Launch, Candidates]]:
        """The launches that the space claims on a target, with their candidates.

        Raises:
            ValueError: two launches have the same label, or one has another data type than the first name of the key.
        """
        launches = self.launches()
        labels = [launch.label for launch in launches]
        if len(set(labels)) < len(labels):
            raise ValueError(f"{self.name}: the labels of launches must differ, got {labels}")
        first = self.function.key[0]
        for launch in launches:
            if launch.arguments[first].dtype != launch.dtype:
                raise ValueError(
                    f"{self.name}: the launch {launch.label!r} has the data type {launch.dtype}, "
                    f"and its {first} {launch.arguments[first].dtype}"
                )
            found = self.space.find(target, dtype=launch.dtype, flags=launch.arguments)
            if found is not None:
                yield launch, found


@dataclass(frozen=True, kw_only=True)
class Example:
    """Inputs of an operator.

    Attributes:
        label: names it among the operator's examples.
        inputs: gives the keyword arguments of `Op.run` for a device, the same values at every call: fresh tensors, so
            that an operator that works in place may be run on them. For the meta device it takes no memory.
        tolerance: the largest relative RMS error of an output or gradient against the reference in float64.
        large: whether it is for timing on a GPU; the others are small, for correctness anywhere.
    """

    label: str
    inputs: Callable[[torch.device], dict[str, Any]]
    tolerance: float
    large: bool = False


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run must at least move and compute.

    Attributes:
        moved_bytes: each input read once, each output written once.
        flops: of the matrix products; 0 for an operator that memory alone limits.
    """

    moved_bytes: int
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Op:
    """A public operator and all that is known of it.

    Attributes:
        name: the stem of its module or folder.
        kernels: its kernels.
        run: the operator; returns a tensor or a tuple of tensors. One that works in place returns what it changed.
        reference: the plain torch version with the same arguments, in float64 if they are.
        examples: gives the examples; labels differ.
        cost: the cost of the forward run, from the same keyword arguments as `run` (meta tensors do).
        gradients: names of the inputs that receive gradients; none for an operator without a backward.
        backward_cost: the cost of the backward run; None without gradients.
    """

    name: str
    kernels: tuple[Kernel, ...]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    examples: Callable[[], Sequence[Example]]
    cost: Callable[..., Cost]
    gradients: tuple[str, ...] = field(default=())
    backward_cost: Callable[..., Cost] | None = None

    def __post_init__(self) -> None:
        names = [kernel.name for kernel in self.kernels]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.name}: kernels must be there and have different names, got {names}")
        if bool(self.gradients) != (self.backward_cost is not None):
            raise ValueError(f"{self.name}: gradients and backward_cost go together, got {self.gradients}")


def register(op: Op) -> Op:
    """Adds an operator and returns it. A module that is loaded anew replaces its own operator.

    Raises:
        ValueError: another module has registered that name.
    """
    former = _ops.get(op.name)
    if former is not None and former.run.__module__ != op.run.__module__:
        raise ValueError(f"name {op.name!r} is taken by {former.run.__module__}, and {op.run.__module__} wants it too")
    _ops[op.name] = op
    return op


def registered() -> tuple[Op, ...]:
    """The operators registered so far, sorted by name."""
    return tuple(_ops[name] for name in sorted(_ops))


def load_all() -> tuple[Op, ...]:
    """Imports every module of `automodel_kernels`, and returns all operators sorted by name."""
    # Found by its place: an import of the package from here would go upwards.
    package = Path(__file__).resolve().parents[1]
    for info in pkgutil.walk_packages([str(package)], f"{package.name}."):
        if not info.name.rsplit(".", 1)[-1].startswith("_"):
            importlib.import_module(info.name)
    return registered()


def get(name: str) -> Op:
    """The registered operator of that name.

    Raises:
        ValueError: there is none; names those there are.
    """
    if name not in _ops:
        raise ValueError(
            f"name must be a registered operator ({', '.join(sorted(_ops)) or 'there is none'}), got {name!r}"
        )
    return _ops[name]
