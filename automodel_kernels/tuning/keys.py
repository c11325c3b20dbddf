"""What a launch's configuration and binary depend on beyond its data types, as explicit flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["rows_aligned"]

# The widest load or store of a thread.
WIDEST_BYTES = 16


def rows_aligned(*matrices: torch.Tensor) -> bool:
    """Whether every row of the matrices can be read and written 16 bytes at a time, which kernels call ALIGNED.

    Columns lie side by side, addresses and row strides are multiples of 16 bytes, and the number of columns is a
    multiple of 16, so that a kernel may round it to one and the compiler sees it.

    Args:
        matrices: 2-D, of any data types; meta tensors count as if their address were aligned.
    """
    return all(
        each.stride(1) == 1
        and each.shape[1] % 16 == 0
        and each.stride(0) * each.element_size() % WIDEST_BYTES == 0
        and (each.device.type == "meta" or each.data_ptr() % WIDEST_BYTES == 0)
        for each in matrices
    )
