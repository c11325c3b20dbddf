"""Replaces a few rows of a matrix, in place, by the same rows of another one scaled to a given norm.

    weight[i] = source[i] * target_norm / norm(source[i])        for i in row_ids; weight and source [rows, cols]

The norm is that of the whole row: where columns are sharded the caller passes it, since a shard knows only its part.
Values are computed in fp32 and rounded once to the weight's data type. The factor is formed in float64 and applied as
two fp32 ones, a power of two and the rest, so that every norm from 1e-45 to 3e38 can be scaled to every other.

Bytes: len(row_ids) * cols * (itemsize of the source + itemsize of the weight). Memory is the limit; with the few rows
that it is made for, starting the launch is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.hardware import runs_triton
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import rows_aligned
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Launch, Op, register

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ROW_REPAIR", "repair_rows_", "repair_rows_reference_"]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)

# Elements that are handled at a time where rows are copied: 2 MiB in fp32 on a CPU, 64 MiB on a GPU.
CHUNK_ELEMENTS = 1 << 19
GPU_CHUNK_ELEMENTS = 1 << 24


def repair_rows_reference_(
    weight: torch.Tensor,
    source: torch.Tensor,
    row_ids: torch.Tensor,
    target_norm: float,
    source_norms: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula in float64, with the arguments of `repair_rows_` and without its checks."""
    rows = source.detach()[row_ids].to(torch.float64)
    norms = torch.linalg.vector_norm(rows, dim=1) if source_norms is None else source_norms.to(torch.float64)
    weight.detach()[row_ids] = (rows / norms[:, None] * target_norm).to(weight.dtype)
    return weight


@tuned(space=spaces.ROW_REPAIR, key=("weight_ptr", "source_ptr", "ALIGNED"), restores=("weight_ptr",))
@triton.jit(
    do_not_specialize=[
        "weight_ptr",
        "source_ptr",
        "row_ids_ptr",
        "factors_ptr",
        "num_cols",
        "stride_weight_row",
        "stride_weight_col",
        "stride_source_row",
        "stride_source_col",
    ]
)
def repair_rows_kernel(
    weight_ptr,
    source_ptr,
    row_ids_ptr,
    factors_ptr,
    num_cols,
    stride_weight_row,
    stride_weight_col,
    stride_source_row,
    stride_source_col,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    row = tl.load(row_ids_ptr + pid_m)
    coarse = tl.load(factors_ptr + 2 * pid_m)
    fine = tl.load(factors_ptr + 2 * pid_m + 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row_ptr = weight_ptr + row * stride_weight_row.to(tl.int64)
    source_row_ptr = source_ptr + row * stride_source_row.to(tl.int64)
    if ALIGNED:
        # Arguments are not specialised: this, and a number of columns that visibly is a multiple of 16, tells the
        # compiler that 16 bytes may be moved at a time.
        num_cols = num_cols // 16 * 16
        weight_ptrs = tl.multiple_of(tl.max_contiguous(weight_row_ptr + offs_n, BLOCK_N), 16)
        source_ptrs = tl.multiple_of(tl.max_contiguous(source_row_ptr + offs_n, BLOCK_N), 16)
    else:
        weight_ptrs = weight_row_ptr + offs_n * stride_weight_col.to(tl.int64)
        source_ptrs = source_row_ptr + offs_n * stride_source_col.to(tl.int64)
    mask_n = offs_n < num_cols
    x = tl.load(source_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(weight_ptrs, (x * coarse * fine).to(weight_ptr.dtype.element_ty), mask=mask_n)


def _launch(weight: torch.Tensor, source: torch.Tensor, row_ids: torch.Tensor, factors: torch.Tensor) -> None:
    num_cols = weight.shape[1]
    aligned = rows_aligned(weight, source)

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        return len(row_ids), triton.cdiv(num_cols, meta["BLOCK_N"])

    repair_rows_kernel[grid](
        weight,
        source,
        row_ids,
        factors,
        num_cols,
        weight.stride(0),
        weight.stride(1),
        source.stride(0),
        source.stride(1),
        ALIGNED=aligned,
    )


def _torch_repair(weight: torch.Tensor, source: torch.Tensor, row_ids: torch.Tensor, factors: torch.Tensor) -> None:
    height = _chunk_rows(source)
    for ids, each in zip(row_ids.split(height), factors.split(height), strict=True):
        rows = source.index_select(0, ids).to(torch.float32).mul_(each[:, :1]).mul_(each[:, 1:])
        weight.index_copy_(0, ids, rows.to(weight.dtype))


def _chunk_rows(source: torch.Tensor) -> int:
    elements = GPU_CHUNK_ELEMENTS if source.device.type == "cuda" else CHUNK_ELEMENTS
    return max(1, elements // max(1, source.shape[1]))


def repair_rows_(
    weight: torch.Tensor,
    source: torch.Tensor,
    row_ids: torch.Tensor | Sequence[int],
    target_norm: float,
    source_norms: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sets rows of `weight` to the same rows of `source`, scaled to the L2 norm `target_norm`, in place.

    No other element is written, and none before everything has been checked. A weight that requires a gradient, or is
    frozen, stays so. On a GPU one launch writes; the checks wait for the GPU.

    Args:
        weight: [rows, cols]; bfloat16, float16 or float32; any strides. Not a DTensor: pass its local tensor.
        source: [rows, cols] on the same device; one of the same data types, any strides. It is `weight`, or shares no
            memory with it; that is not checked.
        row_ids: [count] integers, all different, from 0 to rows - 1. On the CPU they cost no wait for the GPU.
        target_norm: the L2 norm that the whole rows get.
        source_norms: [count] floats: the L2 norm of the whole row of the source that each id names. Needed where
            columns are sharded; by default it is computed from `source`.

    Returns:
        `weight`.

    Raises:
        ValueError: a tensor's shape, data type or device is not as above, or it holds no data (meta); elements of
            `weight` share memory; an id is out of range or a duplicate; `target_norm` is not positive and finite; a
            row of the source cannot be scaled, since it or its norm is zero, NaN or Inf; a value would overflow
            the weight's data type. Names the argument and the ids; nothing was written.
    """
    written, source = weight.detach(), source.detach()
    _check_matrices(written, source)
    if not (math.isfinite(target_norm) and target_norm > 0):
        raise ValueError(f"target_norm must be positive and finite, got {target_norm}")
    ids = _checked_ids(row_ids, num_rows=weight.shape[0])
    if source_norms is not None and (source_norms.shape != ids.shape or not source_norms.is_floating_point()):
        raise ValueError(
            f"source_norms must hold one float per row id, [{len(ids)}], "
            f"got {source_norms.dtype} of the shape {tuple(source_norms.shape)}"
        )
    if not len(ids) or not weight.shape[1]:
        return weight
    device_ids = ids.to(weight.device)
    factors = _checked_factors(written, source, ids, device_ids, target_norm=target_norm, source_norms=source_norms)
    repair = _launch if runs_triton(weight.device) else _torch_repair
    repair(written, source, device_ids, factors.to(weight.device))
    return weight


def _check_matrices(weight: torch.Tensor, source: torch.Tensor) -> None:
    for name, each in (("weight", weight), ("source", source)):
        if each.ndim != 2:
            raise ValueError(f"{name} must be 2-D, [rows, cols], got the shape {tuple(each.shape)}")
        if each.dtype not in DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float32, got {each.dtype}")
        if each.device.type == "meta":
            raise ValueError(f"{name} must hold data, got a meta tensor")
    if source.shape != weight.shape:
        raise ValueError(f"source must have the weight's shape {tuple(weight.shape)}, got {tuple(source.shape)}")
    if source.device != weight.device:
        raise ValueError(f"source must be on the weight's device {weight.device}, got {source.device}")
    if _elements_overlap(weight):
        raise ValueError(
            f"weight must have its own memory for every element, got the shape {tuple(weight.shape)} "
            f"with the strides {weight.stride()}"
        )


def _elements_overlap(matrix: torch.Tensor) -> bool:
    """Whether two elements of a matrix have the same address."""
    if matrix.numel() < 2:
        return False
    (num_rows, num_cols), (row, col) = matrix.shape, matrix.stride()
    # The least steps down and to the left that lead back to the same address are col / divisor and row / divisor.
    divisor = math.gcd(row, col) or 1
    return col // divisor < num_rows and row // divisor < num_cols


def _checked_ids(row_ids: torch.Tensor | Sequence[int], *, num_rows: int) -> torch.Tensor:
    """The ids as int64 on the CPU."""
    # Without elements a list has no type of its own.
    ids = torch.as_tensor(row_ids).cpu() if len(row_ids) else torch.empty(0, dtype=torch.int64)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"row_ids must be integers in one dimension, got {ids.dtype} of the shape {tuple(ids.shape)}")
    ids = ids.to(torch.int64)
    outside = ids[(ids < 0) | (ids >= num_rows)]
    if len(outside):
        raise ValueError(f"row_ids must be from 0 to {num_rows - 1}, got {_listed(outside)}")
    found, counts = ids.unique(return_counts=True)
    if len(found) < len(ids):
        raise ValueError(f"row_ids must be all different, got more than once: {_listed(found[counts > 1])}")
    return ids


def _listed(ids: torch.Tensor, *, most: int = 20) -> str:
    """`[3, 7]`, cut short after `most`."""
    text = ", ".join(str(each) for each in ids[:most].tolist())
    return f"[{text}{f', ... ({len(ids)} in all)' if len(ids) > most else ''}]"


def _checked_factors(
    weight: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
    device_ids: torch.Tensor,
    *,
    target_norm: float,
    source_norms: torch.Tensor | None,
) -> torch.Tensor:
    """The two factors of each row, [count, 2] float32 on the CPU: a power of two, and the rest."""
    largest, norms = _measured_rows(source, device_ids, with_norms=source_norms is None)
    if source_norms is not None:
        norms = source_norms.detach().cpu().to(torch.float64)
    bad = ~(norms.isfinite() & (norms > 0) & largest.isfinite())
    if bad.any():
        what = "source" if source_norms is None else "source, or source_norms,"
        raise ValueError(
            f"{what} holds zero, NaN or Inf for the rows {_listed(ids[bad])}, which then have no direction"
        )
    factor = target_norm / norms
    exponent = factor.frexp().exponent
    coarse = torch.ones_like(factor).ldexp(exponent // 2)
    factors = torch.stack((coarse, factor / coarse), dim=1).to(torch.float32)
    # The factors and their products are exact to 2^-22, by which a value may come out too large.
    limit = torch.finfo(weight.dtype).max * (1 - 2**-22)
    bad = (largest * factor > limit) | ~factors.isfinite().all(1)
    if bad.any():
        raise ValueError(f"target_norm {target_norm} overflows {_name(weight.dtype)} in the rows {_listed(ids[bad])}")
    return factors


def _measured_rows(source: torch.Tensor, ids: torch.Tensor, *, with_norms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest absolute value of each row, NaN if it has one, and its norm, or nothing; float64 on the CPU."""
    largest, norms = [], []
    for each in ids.split(_chunk_rows(source)):
        rows = source.index_select(0, each)
        largest.append(torch.linalg.vector_norm(rows, ord=math.inf, dim=1))
        if with_norms:
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    none = torch.empty(0, dtype=torch.float64)
    return torch.cat(largest).to("cpu", torch.float64), torch.cat(norms).cpu() if with_norms else none


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _launches() -> list[Launch]:
    return [
        Launch(
            label=f"{_name(weight)} from {_name(source)}{'' if aligned else ' unaligned'}",
            dtype=weight,
            arguments={
                "weight_ptr": weight,
                "source_ptr": source,
                "row_ids_ptr": torch.int64,
                "factors_ptr": torch.float32,
                "num_cols": 4096,
                "stride_weight_row": 4096,
                "stride_weight_col": 1,
                "stride_source_row": 4096,
                "stride_source_col": 1,
                "ALIGNED": aligned,
            },
        )
        for weight in DTYPES
        for source in DTYPES
        for aligned in (True, False)
    ]


def _example(
    dtype: torch.dtype,
    shape: tuple[int, int],
    *,
    source_dtype: torch.dtype | None = None,
    count: int,
    sharded: bool = False,
    large: bool = False,
) -> Example:
    """Normal values; every second row from the last on is replaced, twice its norm being given if `sharded`."""

    def inputs(device: torch.device) -> dict[str, object]:
        place = device if large or device.type == "meta" else torch.device("cpu")
        weight, source = (torch.empty(shape, dtype=dtype if large else torch.float32, device=place) for _ in range(2))
        if place.type != "meta":
            generator = torch.Generator(place).manual_seed(0)
            weight.normal_(generator=generator)
            source.normal_(generator=generator)
        source = source.to(source_dtype or dtype)
        norms = 2 * torch.linalg.vector_norm(source, dim=1, dtype=torch.float32) if sharded else None
        ids = torch.arange(shape[0] - 1, -1, -2)[:count]
        return {
            "weight": weight.to(device, dtype),
            "source": source.to(device),
            "row_ids": ids,
            # As large as the rows that stay: an error in those that are replaced shows in the whole.
            "target_norm": shape[1] ** 0.5,
            "source_norms": None if norms is None else norms[ids.to(norms.device)].to(device),
        }

    label = f"{_name(dtype)} from {_name(source_dtype or dtype)} {count} of {shape[0]}x{shape[1]}"
    label += " sharded" if sharded else ""
    # Rounding once is off by half of eps at most; the root of its mean square over all values is below a quarter.
    return Example(label=label, inputs=inputs, tolerance=max(2e-7, torch.finfo(dtype).eps / 4), large=large)


def _examples() -> list[Example]:
    return [
        _example(torch.bfloat16, (12, 1040), count=3),
        _example(torch.bfloat16, (7, 1041), count=4, sharded=True),
        _example(torch.float32, (9, 16), count=2, sharded=True),
        _example(torch.float32, (5, 2050), count=1),
        _example(torch.float16, (8, 96), count=4),
        _example(torch.bfloat16, (8, 96), source_dtype=torch.float32, count=3),
        _example(torch.bfloat16, (151_936, 4096), count=20, large=True),
        _example(torch.bfloat16, (151_936, 4096), count=16_384, large=True),
    ]


def _cost(
    weight: torch.Tensor,
    source: torch.Tensor,
    row_ids: torch.Tensor,
    target_norm: float,
    source_norms: torch.Tensor | None = None,
) -> Cost:
    return Cost(moved_bytes=len(row_ids) * weight.shape[1] * (weight.element_size() + source.element_size()))


ROW_REPAIR = register(
    Op(
        name="row_repair",
        kernels=(Kernel(function=repair_rows_kernel, launches=_launches),),
        run=repair_rows_,
        reference=repair_rows_reference_,
        examples=_examples,
        cost=_cost,
    )
)
