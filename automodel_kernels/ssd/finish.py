"""The end of the backward: the gradients of dt, A and dt_bias, and the sums over what programs left apart.

With p, q, x.u and the sums of W of `chunk_backward`, for the tokens of a chunk and head:

    da_j  = sum of W_ts over s < j <= t + sum of p over j and later tokens + sum of q over earlier tokens
            + exp(L_end) <G, S>
    ddts  = x . u + A da                  dA = sum of dts da over all tokens
    ddt   = ddts through clamp and softplus            ddt_bias = sum of ddt over all tokens

q counts only where its token reaches the chunk's end, p only where the state at the chunk's start reaches the token:
both are 0 elsewhere. Everything is fp32, in a fixed order. `reduce_partials` then adds dB and dC over the blocks of
heads, and dA, ddt_bias and dD over chunks or tiles.

Bytes a token: heads * about 36; 8 * groups * state for each block of heads, and dB and dC. Memory alone is the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import find_span
from automodel_kernels.ssd.segment_states import softplus
from automodel_kernels.ssd.tiles import CHUNK_TOKENS
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from automodel_kernels.ssd.chunk_backward import ChunkGradients
    from automodel_kernels.ssd.tiles import Spans

__all__ = ["finish_decay_kernel", "launch_finish_decay", "launch_reduce_partials", "reduce_partials_kernel"]

FINISH_UNSPECIALIZED = (
    "dts_ptr",
    "dt_ptr",
    "bias_ptr",
    "a_ptr",
    "cu_seqlens_ptr",
    "xu_ptr",
    "p_ptr",
    "q_ptr",
    "row_sums_ptr",
    "col_sums_ptr",
    "end_terms_ptr",
    "ddt_ptr",
    "partial_a_ptr",
    "partial_bias_ptr",
    "seqlen",
    "batch",
    "num_seqs",
    "num_heads",
    "stride_dt_batch",
    "stride_dt_token",
    "stride_dt_head",
    "stride_bias",
    "stride_a",
    "dt_min",
    "dt_max",
)
REDUCE_UNSPECIALIZED = (
    "partial_b_ptr",
    "partial_c_ptr",
    "partial_a_ptr",
    "partial_bias_ptr",
    "partial_d_ptr",
    "db_ptr",
    "dc_ptr",
    "da_ptr",
    "dbias_ptr",
    "dd_ptr",
    "num_elements",
    "num_head_blocks",
    "num_chunks",
    "num_heads",
    "num_tiles",
    "num_d",
)


@triton.jit
def sum_of_later(values, tiles):
    """For each tile the sum of the values of all later ones."""
    return tl.sum(tl.where(tiles[None, :] > tiles[:, None], values[None, :], 0.0), axis=1)


@triton.jit
def sum_of_earlier(values, tiles):
    """For each tile the sum of the values of all earlier ones."""
    return tl.sum(tl.where(tiles[None, :] < tiles[:, None], values[None, :], 0.0), axis=1)


@tuned(space=spaces.SSD_FINISH, key=("dts_ptr",), outputs=("ddt_ptr", "partial_a_ptr"))
@triton.jit(do_not_specialize=FINISH_UNSPECIALIZED)
def finish_decay_kernel(
    dts_ptr,
    dt_ptr,
    bias_ptr,
    a_ptr,
    cu_seqlens_ptr,
    xu_ptr,
    p_ptr,
    q_ptr,
    row_sums_ptr,
    col_sums_ptr,
    end_terms_ptr,
    ddt_ptr,
    partial_a_ptr,
    partial_bias_ptr,
    seqlen: tl.int32,
    batch: tl.int32,
    num_seqs: tl.int32,
    num_heads: tl.int32,
    stride_dt_batch: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_bias: tl.int64,
    stride_a: tl.int64,
    dt_min,
    dt_max,
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    VARLEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (chunk, head); heads fastest, so that neighbours share the lines of dt and ddt."""
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    chunk = pid // num_heads
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, chunk, CHUNK_TOKENS, VARLEN)
    start = begin + index * CHUNK_TOKENS
    chunk_head = chunk.to(tl.int64) * num_heads + head
    if start >= end:
        tl.store(partial_a_ptr + chunk_head, 0.0)
        if HAS_DT_BIAS:
            tl.store(partial_bias_ptr + chunk_head, 0.0)
        return
    row = seq.to(tl.int64) * (0 if VARLEN else 1)
    token_row = (row * num_heads + head) * seqlen
    stride_sums = batch.to(tl.int64) * num_heads * seqlen
    # Tokens as [tiles, TILE]; `before` are the tokens before, where a tile has one.
    tiles = tl.arange(0, CHUNK_TOKENS // TILE)
    in_tile = tl.arange(0, TILE)[None, :]
    offs = start + tiles[:, None] * TILE + in_tile
    mask = offs < end
    mask_before = mask & (in_tile > 0)
    num_tiles = (tl.minimum(CHUNK_TOKENS, end - start) + TILE - 1) // TILE

    # A pair of tokens s < t has its W counted at the tokens from s + 1 to t. In the tile of t that is a sum over later
    # tokens, in the tile of s one over earlier tokens, in tiles between it is the sum of the two tiles' pairs. Only
    # where both are in one tile it takes a difference.
    p = tl.load(p_ptr + token_row + offs, mask=mask, other=0.0)
    q = tl.load(q_ptr + token_row + offs - 1, mask=mask_before, other=0.0)
    last_offs = start + tiles * TILE + TILE - 1
    last_q = tl.load(q_ptr + token_row + last_offs, mask=last_offs < end, other=0.0)
    da = tl.load(end_terms_ptr + chunk_head) + sum_of_later(tl.sum(p, axis=1), tiles)
    da += sum_of_earlier(tl.sum(q, axis=1) + last_q, tiles)
    for other in range(num_tiles):
        sums = other * stride_sums + token_row + offs
        rows = tl.load(row_sums_ptr + sums, mask=mask & (tiles > other)[:, None], other=0.0)
        da += tl.where(tiles > other, sum_of_later(tl.sum(rows, axis=1), tiles), 0.0)
        p += rows + tl.load(row_sums_ptr + sums, mask=mask & (tiles == other)[:, None], other=0.0)
        p -= tl.load(col_sums_ptr + sums, mask=mask & (tiles == other)[:, None], other=0.0)
        q += tl.load(col_sums_ptr + sums - 1, mask=mask_before & (tiles < other)[:, None], other=0.0)
    da = da[:, None] + tl.cumsum(p, axis=1, reverse=True) + tl.cumsum(q, axis=1)
    da = tl.where(mask, da, 0.0)
    dts = tl.load(dts_ptr + token_row + offs, mask=mask, other=0.0)
    tl.store(partial_a_ptr + chunk_head, tl.sum(tl.sum(da * dts, axis=1), axis=0))

    ddt = tl.load(xu_ptr + token_row + offs, mask=mask, other=0.0)
    ddt += tl.load(a_ptr + head * stride_a).to(tl.float32) * da
    dt_ptr += row * stride_dt_batch + head * stride_dt_head
    step = tl.load(dt_ptr + offs.to(tl.int64) * stride_dt_token, mask=mask, other=0.0).to(tl.float32)
    if HAS_DT_BIAS:
        step += tl.load(bias_ptr + head * stride_bias).to(tl.float32)
    if DT_SOFTPLUS:
        slope = 1.0 / (1.0 + tl.exp(-step))
        step = softplus(step)
    else:
        slope = tl.zeros_like(step) + 1.0
    # At a limit the gradient passes, and a NaN shows.
    outside = (step < dt_min) | (step > dt_max)
    ddt = tl.where(mask & (outside == 0), ddt * slope, 0.0)
    ddt_ptrs = ddt_ptr + (row * seqlen + offs) * num_heads + head
    tl.store(ddt_ptrs, ddt.to(ddt_ptr.dtype.element_ty), mask=mask)
    if HAS_DT_BIAS:
        tl.store(partial_bias_ptr + chunk_head, tl.sum(tl.sum(ddt, axis=1), axis=0))


@triton.jit
def add_rows(partial_ptr, out_ptr, block, num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[j] = the sum of column j of partial [num_rows, num_cols], for one block of columns."""
    cols = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = cols < num_cols
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, num_rows, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & mask_n[None, :]
        total += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * num_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=mask_n)


@tuned(space=spaces.SSD_REDUCE, key=("partial_b_ptr",), outputs=("db_ptr", "dc_ptr", "da_ptr"))
@triton.jit(do_not_specialize=REDUCE_UNSPECIALIZED)
def reduce_partials_kernel(
    partial_b_ptr,
    partial_c_ptr,
    partial_a_ptr,
    partial_bias_ptr,
    partial_d_ptr,
    db_ptr,
    dc_ptr,
    da_ptr,
    dbias_ptr,
    dd_ptr,
    num_elements: tl.int64,
    num_head_blocks: tl.int32,
    num_chunks: tl.int32,
    num_heads: tl.int32,
    num_tiles: tl.int32,
    num_d: tl.int32,
    HAS_DT_BIAS: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Programs for dA, ddt_bias and dD, whose sums are long, then for dB and dC alternately."""
    pid = tl.program_id(0)
    head_programs = (num_heads + BLOCK_COLS - 1) // BLOCK_COLS
    if pid < head_programs:
        add_rows(partial_a_ptr, da_ptr, pid, num_chunks, num_heads, BLOCK_ROWS, BLOCK_COLS)
        return
    pid -= head_programs
    if HAS_DT_BIAS:
        if pid < head_programs:
            add_rows(partial_bias_ptr, dbias_ptr, pid, num_chunks, num_heads, BLOCK_ROWS, BLOCK_COLS)
            return
        pid -= head_programs
    if HAS_D:
        d_programs = (num_d + BLOCK_COLS - 1) // BLOCK_COLS
        if pid < d_programs:
            add_rows(partial_d_ptr, dd_ptr, pid, num_tiles, num_d, BLOCK_ROWS, BLOCK_COLS)
            return
        pid -= d_programs
    if pid % 2 == 0:
        add_rows(partial_b_ptr, db_ptr, pid // 2, num_head_blocks, num_elements, 1, BLOCK)
    else:
        add_rows(partial_c_ptr, dc_ptr, pid // 2, num_head_blocks, num_elements, 1, BLOCK)


def launch_finish_decay(
    dt: torch.Tensor,
    A: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None,
    dts: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    parts: ChunkGradients,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ddt [batch, seqlen, heads] in dt's dtype, and of dA and ddt_bias the parts [num_chunks, heads] in fp32."""
    batch, seqlen, num_heads = dt.shape
    ddt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    partial_a = torch.empty(spans.num_chunks, num_heads, dtype=torch.float32, device=dt.device)
    partial_bias = None if dt_bias is None else torch.empty_like(partial_a)
    finish_decay_kernel[(spans.num_chunks * num_heads,)](
        dts,
        dt,
        dt if dt_bias is None else dt_bias,
        A,
        dts if cu_seqlens is None else cu_seqlens,
        parts.xu,
        parts.p,
        parts.q,
        parts.row_sums,
        parts.col_sums,
        parts.end_terms,
        ddt,
        partial_a,
        partial_a if partial_bias is None else partial_bias,
        seqlen,
        batch,
        spans.num_seqs,
        num_heads,
        *dt.stride(),
        0 if dt_bias is None else dt_bias.stride(0),
        A.stride(0),
        *dt_limit,
        HAS_DT_BIAS=dt_bias is not None,
        DT_SOFTPLUS=dt_softplus,
        VARLEN=cu_seqlens is not None,
        TILE=parts.tile,
    )
    return ddt, partial_a, partial_bias


def launch_reduce_partials(
    parts: ChunkGradients,
    *,
    partial_a: torch.Tensor,
    partial_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dB and dC [batch, seqlen, groups, state] in `dtype`; dA, ddt_bias [heads], dD [heads, head_dim or 1] in fp32."""
    num_blocks, *shape = parts.partial_b.shape
    num_chunks, num_heads = partial_a.shape
    num_tiles, num_d = (0, 0) if parts.partial_d is None else (len(parts.partial_d), parts.partial_d[0].numel())

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=partial_a.device)

    db = torch.empty(shape, dtype=dtype, device=partial_a.device)
    dc = torch.empty_like(db)
    da = floats(num_heads)
    dbias = None if partial_bias is None else floats(num_heads)
    dd = None if parts.partial_d is None else floats(*parts.partial_d.shape[1:])

    def grid(meta: dict[str, int]) -> tuple[int]:
        vectors = 1 + (dbias is not None)
        small = vectors * triton.cdiv(num_heads, meta["BLOCK_COLS"]) + triton.cdiv(num_d, meta["BLOCK_COLS"])
        return (small + 2 * triton.cdiv(db.numel(), meta["BLOCK"]),)

    reduce_partials_kernel[grid](
        parts.partial_b,
        parts.partial_c,
        partial_a,
        partial_a if partial_bias is None else partial_bias,
        partial_a if parts.partial_d is None else parts.partial_d,
        db,
        dc,
        da,
        da if dbias is None else dbias,
        da if dd is None else dd,
        db.numel(),
        num_blocks,
        num_chunks,
        num_heads,
        num_tiles,
        num_d,
        HAS_DT_BIAS=dbias is not None,
        HAS_D=dd is not None,
    )
    return db, dc, da, dbias, dd
