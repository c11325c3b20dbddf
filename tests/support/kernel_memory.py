"""Memory that shows what a kernel should not have read or written: poison in new tensors, sentinels around old ones."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Guarded", "poisoned_empty"]

SENTINEL = 0xA5


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside it `torch.empty` and its relatives give NaN, or the largest integer, until something is written.

    This is PyTorch's own filling of uninitialised memory, which comes with its deterministic algorithms.
    """
    former = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    former_fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = former_fill
        torch.use_deterministic_algorithms(former[0], warn_only=former[1])


class Guarded:
    """A copy of a tensor inside a larger buffer of sentinels, with gaps between its elements if asked.

    Args:
        values: what the copy holds; any dtype and number of dimensions.
        row_gap: elements between the end of a row (along the last dimension) and the next row.
        column_step: stride along the last dimension.
        margin: elements before and after.

    Attributes:
        tensor: the copy, a view with the strides asked for.
    """

    def __init__(self, values: torch.Tensor, *, row_gap: int = 0, column_step: int = 1, margin: int = 64) -> None:
        strides, stride = [0] * values.ndim, column_step
        for dimension in reversed(range(values.ndim)):
            strides[dimension] = stride
            stride = stride * values.shape[dimension] + (row_gap if dimension == values.ndim - 1 else 0)
        size = 2 * margin + max(stride, 1)
        self._bytes = torch.full((size * values.element_size(),), SENTINEL, dtype=torch.uint8)
        elements = self._bytes.view(values.dtype)
        self.tensor = elements.as_strided(values.shape, strides, margin)
        self.tensor.copy_(values)
        inside = torch.zeros(size, dtype=torch.bool)
        inside.as_strided(values.shape, strides, margin).fill_(True)
        self._outside = (~inside).repeat_interleave(values.element_size())

    def check(self) -> None:
        """Fails if a byte outside the tensor's elements has changed."""
        touched = (self._bytes[self._outside] != SENTINEL).sum().item()
        assert touched == 0, f"{touched} bytes outside the tensor were written"
