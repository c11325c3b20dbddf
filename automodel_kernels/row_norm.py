"""Squared L2 norms of the rows of a matrix, in one read of it and for every magnitude that its data type can hold.

    norms[i] = sum over j of x[i, j]^2            x [rows, cols], norms [rows] float64

Squares are added in fp32. Where that leaves the range in which fp32 is exact - the sum is infinite, or below 1e-15 -
the row is read again: the kernel scales it by a power of two near its largest value, the torch path adds in float64.
So a finite row of 1e30 does not overflow and one of 1e-30 does not vanish; NaN and Inf in a row are NaN and Inf in its
norm. Norms of column shards are partial sums and may be added. Each row is added by one program in a fixed order: there
are no atomics, and equal inputs give equal bits.

Bytes: rows * cols * itemsize + 8 * rows. Two FLOPs an element, so memory alone is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.hardware import current_target, runs_triton
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import rows_aligned
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Launch, Op, register

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ROW_NORM", "RowNormSummary", "row_norm_summary", "row_squared_norms", "row_squared_norms_reference"]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float32, torch.float16, *FLOAT8)

# Below this sum of squares fp32 loses digits of squares, or whole squares.
SMALLEST_EXACT = 1e-15
SMALLEST_EXACT_SUM = tl.constexpr(SMALLEST_EXACT)

# What the torch path handles at a time: 2 MiB in fp32, which stays in the cache. Of a row no more than can be added in
# fp32 without losing digits; pieces of rows are added in float64.
CHUNK_ELEMENTS = 1 << 19
CHUNK_COLUMNS = 1 << 12


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_squared_norms_reference(x: torch.Tensor) -> torch.Tensor:
    """The formula in float64, [rows, cols] -> [rows]; needs memory for two float64 copies of the matrix."""
    return x.to(torch.float64).square().sum(1)


@triton.jit
def load_tile(
    row_ptrs,
    mask_m,
    start,
    num_cols,
    stride_x_col,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = start + tl.arange(0, BLOCK_N).to(tl.int64)
    if ALIGNED:
        # Arguments are not specialised, so only this tells the compiler that 16 bytes may be loaded at a time.
        ptrs = row_ptrs[:, None] + offs_n[None, :]
        ptrs = tl.multiple_of(tl.max_contiguous(ptrs, (1, BLOCK_N)), (1, 16))
    else:
        ptrs = row_ptrs[:, None] + offs_n[None, :] * stride_x_col
    mask = mask_m[:, None] & (offs_n < num_cols)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@tuned(space=spaces.ROW_NORM, key=("x_ptr", "ALIGNED"), outputs=("norms_ptr",))
@triton.jit(do_not_specialize=["x_ptr", "norms_ptr", "num_rows", "num_cols", "stride_x_row", "stride_x_col"])
def row_squared_norms_kernel(
    x_ptr,
    norms_ptr,
    num_rows,
    num_cols,
    stride_x_row,
    stride_x_col,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(0).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    row_ptrs = x_ptr + offs_m * stride_x_row.to(tl.int64)
    stride_x_col = stride_x_col.to(tl.int64)
    if ALIGNED:
        # Changes nothing but what the compiler knows of the mask: 16 neighbours are in it or out of it together.
        num_cols = num_cols // 16 * 16

    squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        x = load_tile(row_ptrs, mask_m, start, num_cols, stride_x_col, ALIGNED, BLOCK_N)
        squares += x * x
    total = tl.sum(squares, axis=1)
    # Only float64 holds the square of every fp32 norm.
    norms = total.to(tl.float64)

    # A NaN is final; an infinite sum may be an overflow.
    inexact = mask_m & ((total < SMALLEST_EXACT_SUM) | (total == float("inf")))
    if tl.max(inexact.to(tl.int32), axis=0) > 0:
        largest = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            x = load_tile(row_ptrs, mask_m, start, num_cols, stride_x_col, ALIGNED, BLOCK_N)
            largest = tl.maximum(largest, tl.abs(x))
        # The biased exponent of the row's largest value; 254 is left out so that the scale, its inverse, is no
        # subnormal. Scaled values are below 4, and those of a subnormal row at least 2^-22.
        exponent = tl.minimum(tl.max(largest, axis=1).to(tl.int32, bitcast=True) >> 23, 253)
        scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            x = load_tile(row_ptrs, mask_m, start, num_cols, stride_x_col, ALIGNED, BLOCK_N)
            x = x * scale[:, None]
            squares += x * x
        # 2^(exponent - 127), exact: 1023 - 127 = 896 is what the biases differ by.
        unscale = ((exponent.to(tl.int64) + 896) << 52).to(tl.float64, bitcast=True)
        norms = tl.where(inexact, tl.sum(squares, axis=1).to(tl.float64) * unscale * unscale, norms)
    tl.store(norms_ptr + offs_m, norms, mask=mask_m)


def _launch(x: torch.Tensor) -> torch.Tensor:
    num_rows, num_cols = x.shape
    norms = torch.empty(num_rows, dtype=torch.float64, device=x.device)
    aligned = rows_aligned(x)

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (triton.cdiv(num_rows, meta["BLOCK_M"]),)

    row_squared_norms_kernel[grid](
        x,
        norms,
        num_rows,
        num_cols,
        x.stride(0),
        x.stride(1),
        ALIGNED=aligned,
    )
    return norms


def _torch_squared_norms(x: torch.Tensor) -> torch.Tensor:
    """The norms in chunks that fit a core's cache, without the kernel."""
    num_rows, num_cols = x.shape
    width = min(num_cols, CHUNK_COLUMNS)
    height = min(num_rows, CHUNK_ELEMENTS // width)
    lefts = range(0, num_cols, width)
    buffer = torch.empty(height, width, dtype=torch.float32, device=x.device)
    pieces = torch.empty(len(lefts), num_rows, dtype=torch.float32, device=x.device)
    for top in range(0, num_rows, height):
        rows = x[top : top + height]
        for piece, left in zip(pieces, lefts, strict=True):
            chunk = rows[:, left : left + width]
            if x.dtype != torch.float32 or x.stride(1) != 1:
                chunk = buffer[: chunk.shape[0], : chunk.shape[1]].copy_(chunk)
            # Of torch's reductions only this one squares and adds in the same pass over a chunk.
            torch.linalg.vector_norm(chunk, dim=1, out=piece[top : top + height])
    norms = pieces[0].to(torch.float64).square_()
    for piece in pieces[1:]:
        norms += piece.to(torch.float64).square_()
    inexact = ((norms < SMALLEST_EXACT) | (norms == torch.inf)).nonzero().squeeze(1)
    for ids in inexact.split(height):
        norms[ids] = _float64_squared_norms(x, ids, width=width)
    return norms


def _float64_squared_norms(x: torch.Tensor, ids: torch.Tensor, *, width: int) -> torch.Tensor:
    norms = torch.zeros(len(ids), dtype=torch.float64, device=x.device)
    # Rows of bytes can be selected for every data type, those of float8 not.
    selectable = x.view(torch.uint8) if x.element_size() == 1 else x
    for left in range(0, x.shape[1], width):
        chunk = selectable[:, left : left + width].index_select(0, ids).view(x.dtype)
        norms += torch.linalg.vector_norm(chunk.to(torch.float64), dim=1).square_()
    return norms


def row_squared_norms(x: torch.Tensor) -> torch.Tensor:
    """The squared L2 norm of each row of a matrix.

    On a GPU this is one launch that reads the matrix once and does not wait for the GPU; elsewhere it works in chunks
    of 2 MiB. It has no gradient.

    Args:
        x: [rows, cols], either may be 0; bfloat16, float16, float32, or float8 (e4m3fn, e5m2) where the GPU has it;
            any strides. Not a DTensor: pass its local tensor.

    Returns:
        [rows] float64 on x's device, with a relative error below 1e-5, and of about 1e-7 unless values repeat, whatever
        the row's magnitude. A row with a NaN has NaN, another with an Inf has Inf. The norms of column shards add up to
        those of whole rows.

    Raises:
        ValueError: `x` is not 2-D, has another data type or one that its GPU lacks, or holds no data (meta).
    """
    x = x.detach()
    if x.ndim != 2:
        raise ValueError(f"x must be 2-D, [rows, cols], got the shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(_name, DTYPES))}, got {_name(x.dtype)}")
    if runs_triton(x.device):
        target = current_target(x.device)
        if x.dtype in FLOAT8 and _name(x.dtype) not in target.float8:
            raise ValueError(
                f"x is {_name(x.dtype)}, which this GPU (target {target.name}) does not have; "
                f"of the 8-bit types it has {', '.join(target.float8) or 'none'}"
            )
    elif x.device.type == "meta":
        raise ValueError("x must hold data, got a meta tensor")
    if not x.numel():
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    return _launch(x) if runs_triton(x.device) else _torch_squared_norms(x)


@dataclass(frozen=True, kw_only=True)
class RowNormSummary:
    """The squared norms of rows, and what is to be known of all of them; tensors on the matrix's device.

    Attributes:
        squared_norms: [rows] float64.
        smallest: scalar float64, the least of the finite ones; Inf if there are none.
        largest: scalar float64, the greatest of the finite ones; -Inf if there are none.
        nonfinite: scalar int64, how many are NaN or Inf.
    """

    squared_norms: torch.Tensor
    smallest: torch.Tensor
    largest: torch.Tensor
    nonfinite: torch.Tensor


def row_norm_summary(x: torch.Tensor) -> RowNormSummary:
    """The squared norms with their extremes, in the same single read of the matrix and without waiting for a GPU.

    What is missing for lack of finite rows is the neutral element, so that shards of rows can be combined by minimum,
    maximum and sum.

    Args:
        x: as for `row_squared_norms`, whose errors this raises.
    """
    norms = row_squared_norms(x)
    finite = norms.isfinite()
    # The one more element makes the extremes of no rows defined.
    least, greatest = (
        torch.nn.functional.pad(torch.where(finite, norms, neutral), (0, 1), value=neutral)
        for neutral in (torch.inf, -torch.inf)
    )
    return RowNormSummary(
        squared_norms=norms, smallest=least.amin(), largest=greatest.amax(), nonfinite=(~finite).sum()
    )


def _launches() -> list[Launch]:
    return [
        Launch(
            label=f"{_name(dtype)}{'' if aligned else ' unaligned'}",
            dtype=dtype,
            arguments={
                "x_ptr": dtype,
                "norms_ptr": torch.float64,
                "num_rows": 151_936,
                "num_cols": 4096,
                "stride_x_row": 4096,
                "stride_x_col": 1,
                "ALIGNED": aligned,
            },
        )
        for dtype in DTYPES
        for aligned in (True, False)
    ]


def _example(
    dtype: torch.dtype,
    shape: tuple[int, int],
    *,
    scales: tuple[float, ...] = (1.0,),
    transposed: bool = False,
    large: bool = False,
) -> Example:
    """Normal values; the rows are multiplied by `scales`, over and over."""

    def inputs(device: torch.device) -> dict[str, torch.Tensor]:
        source = device if large else torch.device("cpu") if device.type != "meta" else device
        x = torch.empty(shape, device=source, dtype=dtype if large else torch.float32)
        if source.type != "meta":
            x.normal_(generator=torch.Generator(source).manual_seed(0))
        if not large:
            x *= torch.tensor(scales, device=source).repeat(shape[0])[: shape[0], None]
        x = x.to(device, dtype)
        return {"x": x.t() if transposed else x}

    label = f"{_name(dtype)} {shape[0]}x{shape[1]}{' transposed' if transposed else ''}"
    label += "" if scales == (1.0,) else " scaled"
    return Example(label=label, inputs=inputs, tolerance=2e-6, large=large)


def _examples() -> list[Example]:
    scales = (1.0, 1e30, 1e-30, 0.0, float("inf"), float("nan"))
    return [
        _example(torch.bfloat16, (9, 2048)),
        _example(torch.bfloat16, (5, 1001), scales=scales),
        _example(torch.float32, (18, 80), scales=scales),
        _example(torch.float32, (33, 7), transposed=True),
        _example(torch.float16, (3, 1040)),
        _example(torch.float16, (3, 1041)),
        _example(torch.float8_e4m3fn, (4, 512)),
        _example(torch.float8_e4m3fn, (6, 100), scales=(1e-1, 1.0)),
        _example(torch.float8_e5m2, (4, 512)),
        _example(torch.float8_e5m2, (6, 100), scales=(1e-3, 1.0)),
        _example(torch.bfloat16, (151_936, 4096), large=True),
        _example(torch.float32, (151_936, 2048), large=True),
        _example(torch.bfloat16, (151_936, 512), large=True),
    ]


def _cost(x: torch.Tensor) -> Cost:
    return Cost(moved_bytes=x.numel() * x.element_size() + 8 * x.shape[0])


ROW_NORM = register(
    Op(
        name="row_norm",
        kernels=(Kernel(function=row_squared_norms_kernel, launches=_launches),),
        run=row_squared_norms,
        reference=row_squared_norms_reference,
        examples=_examples,
        cost=_cost,
    )
)
