"""A group of processes as one of them sees it: its place among them, and the exchange of values.

Numbers and small objects go through the host. A process that is alone has
a group too, whose exchanges cost nothing, so that callers need not ask how many processes there are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["PeerError", "RankGroup"]

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another rank failed in something that all ranks do together; the message names the rank and its error."""


class RankGroup:
    """The ranks of one process group.

    Attributes:
        rank: This process's rank in the group.
        size: The number of ranks in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a process group; None stands for a process that is alone."""
        self._group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank zero of the group, which speaks for it."""
        return self.rank == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, None for a process that is alone."""
        return self._group

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; they must pickle."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return rank zero's value on every rank; what the others pass is ignored."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors, which every rank passes in the same order, with those of rank zero."""
        if self._group is not None:
            for tensor in tensors:
                # As bytes: not every library carries every dtype.
                flat = tensor.contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(flat, group=self._group, group_src=0)
                tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks, in float64; every rank passes equally many numbers."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maxima over all ranks, in float64; every rank passes equally many numbers."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, value: bool) -> bool:
        """Whether `value` is true on at least one rank."""
        return self.max([float(value)])[0] > 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.max([0.0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on every rank; where it raises on one of them, every rank raises.

        A rank whose body failed raises its own error, the others a `PeerError` that names the first such rank. The
        body must hold no exchange between ranks, unless every rank is sure to take part in it. Errors that are no
        `Exception` (an interrupt) pass through at once.

        Raises:
            PeerError: the body failed on another rank.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a border: it is raised again after the other ranks have been told
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = self.all_gather(told)
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise PeerError(f"rank {rank} failed: {reason}")

    def in_turn(self, make: Callable[[], T], *, is_node_leader: bool) -> T:
        """Call `make` on rank zero, then on one rank of every node, then on the rest; each returns its own result.

        Later ranks find in a cache what earlier ones left there, be it shared or a node's own.

        Raises:
            PeerError: it failed on another rank; a rank where it failed raises its own error.
        """
        made: list[T] = []
        for is_my_turn in (self.is_main, is_node_leader, True):
            with self.together():
                if is_my_turn and not made:
                    made.append(make())
        return made[0]

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self._group is None:
            return [float(value) for value in values]
        # On the host: with NCCL for the device, gloo carries these, and no stream has to be waited for.
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self._group)
        reduced: list[float] = tensor.tolist()
        return reduced
