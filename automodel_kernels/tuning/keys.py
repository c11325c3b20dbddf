"""What a launch's configuration and binary depend on: data types, and explicit flags for all else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KeyValue", "key_fields", "rows_aligned", "tensors_aligned"]

KeyValue = bool | int | float | str | None
"""A value of a key, as it stands in files."""

# The widest load or store of a thread.
WIDEST_BYTES = 16

# Elements of the last dimension that tensors_aligned promises to come together.
LAST_MULTIPLE = 8


def key_fields(names: Iterable[str], values: Iterable[Any]) -> dict[str, KeyValue]:
    """A key as it stands in files: data types by their names (`bfloat16`), other values as they are or as their text.

    Args:
        names: of the arguments.
        values: of each, for a tensor its data type.
    """
    fields: dict[str, KeyValue] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.dtype):
            fields[name] = str(value).removeprefix("torch.")
        else:
            fields[name] = value if value is None or isinstance(value, bool | int | float | str) else str(value)
    return fields


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


def tensors_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether the last dimension of every tensor can be read and written 16 bytes at a time, wherever it starts.

    Its elements lie side by side and their number is a multiple of 8; addresses, and the strides of all other
    dimensions that are longer than 1, are multiples of 16 bytes.

    Args:
        tensors: of any number of dimensions and any data types; None and tensors without dimensions are passed over.
            Meta tensors count as if their address were aligned.
    """
    # This runs before every launch: no more is asked of a tensor than it takes.
    for tensor in tensors:
        if tensor is None:
            continue
        shape = tensor.shape
        if not shape:
            continue
        last = shape[-1]
        if last % LAST_MULTIPLE or (tensor.data_ptr() % WIDEST_BYTES and not tensor.is_meta):
            return False
        itemsize = tensor.element_size()
        if last * itemsize % WIDEST_BYTES == 0 and tensor.is_contiguous():
            continue
        *outer, innermost = tensor.stride()
        if innermost != 1:
            return False
        for stride, size in zip(outer, shape, strict=False):
            if stride * itemsize % WIDEST_BYTES and size > 1:
                return False
    return True
