"""The ranks that hold one weight together: their exchange, which stays among them, and their agreement on errors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automodel.distributed.rank_group import RankGroup

__all__ = ["UnhealthyRepairError", "WeightRanks"]

T = TypeVar("T")


class UnhealthyRepairError(ValueError, RuntimeError):
    """Rows that were computed to replace damaged ones are damaged themselves."""


class WeightRanks:
    """The ranks of a mesh, of one process group, or a process that is alone.

    Every rank calls the methods in the same order. Values pass along one dimension of the mesh after the other, so that
    ranks outside the mesh are never waited for.

    Attributes:
        num_axes: Dimensions of the mesh; 1 for a group, 0 for a process that is alone.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = (), *, device_type: str | None = None) -> None:
        """Take one process group for each dimension.

        Args:
            groups: The groups that this rank belongs to.
            device_type: Where tensors must be to be reduced; None: where they are.
        """
        self._axes = [RankGroup(group) for group in groups]
        self._device_type = device_type
        self.num_axes = len(self._axes)

    @classmethod
    def of(cls, mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> "WeightRanks":
        """The ranks of a mesh, else those of a group; a rank that is not in the mesh is alone."""
        if mesh is not None:
            groups = [mesh.get_group(axis) for axis in range(mesh.ndim)] if mesh.get_coordinate() is not None else []
            return cls(groups, device_type=mesh.device_type)
        return cls([group] if group is not None else [])

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank, which speaks for all."""
        return all(axis.is_main for axis in self._axes)

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return all(axis.size == 1 for axis in self._axes)

    def gather(self, value: T, *, axes: Iterable[int] | None = None) -> list[T]:
        """Return the values of all ranks, or of those along some dimensions, in an order that is the same on each."""
        values = [value]
        for axis in range(self.num_axes) if axes is None else axes:
            values = [one for part in self._axes[axis].all_gather(values) for one in part]
        return values

    def reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, *, axes: Iterable[int]) -> None:
        """Reduce a tensor along some dimensions, in place; every rank along them gets the same bits."""
        # Weights that are kept in host memory may belong to a mesh of devices, whose groups reduce tensors there only.
        moves = self._device_type not in (None, tensor.device.type)
        moved = tensor.to(self._device_type) if moves else tensor
        for axis in axes:
            if self._axes[axis].size > 1:
                dist.all_reduce(moved, op=operation, group=self._axes[axis].process_group)
        if moves:
            tensor.copy_(moved)

    def check_same(self, values: Mapping[str, object]) -> None:
        """Check that every rank has the same values; they must pickle and compare.

        Args:
            values: What is compared, under the names that a message gives it; every rank passes equally many.

        Raises:
            ValueError: two ranks differ in one; on every rank, with the first such value and two of the ranks.
        """
        if self.is_alone:
            return
        gathered = sorted(self.gather((dist.get_rank(), tuple(values.items()))), key=lambda entry: entry[0])
        first_rank, first = gathered[0]
        for place, (name, expected) in enumerate(first):
            for rank, items in gathered[1:]:
                value = items[place][1]
                if value != expected:
                    raise ValueError(
                        f"{name} must be the same on every rank, got {expected!r} on rank {first_rank} "
                        f"and {value!r} on rank {rank}"
                    )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the body on every rank; where it raises on one of them, every rank raises that error.

        The first such rank decides. The body must hold no exchange between ranks. Errors that are no `Exception` (an
        interrupt) pass through at once.

        Raises:
            ValueError: as in the body of the first rank that failed.
            RuntimeError: its body raised something else; a process that is alone raises that itself.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            failure = error
        told = None if failure is None else (_kind(failure), _text(failure))
        first = next((entry for entry in self.gather(told) if entry is not None), None)
        if first is not None:
            kind, text = first
            raise _KINDS[kind](text) from failure


_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (UnhealthyRepairError, ValueError, RuntimeError)}


def _kind(error: Exception) -> str:
    """The name of the class that every rank can raise in place of an error's own."""
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), RuntimeError.__name__)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
