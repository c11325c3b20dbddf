"""What each chunk's tokens add to the gradient of the state that enters it, and how much of a gradient passes through.

With G the gradient of a state [head_dim, state], L the decay since the chunk's start, and the sum over the tokens
before the chunk's first border:

    local = sum_t exp(L_t) dy_t C_t^T        factor = exp(L of the last token), or 0 if a border lies in the chunk
    G entering = factor * G leaving + local                                              (done by `state_passing`)

dy [batch, seqlen, heads, head_dim], C [batch, seqlen, groups, state]. Products take C and the scaled dy in their own
type and add in fp32; local is kept in that type, [num_chunks, heads, head_dim, state], factor in fp32 [num_chunks,
heads].

Bytes a token: heads * (head_dim * (1 + state / 256) * itemsize + 4) and C. FLOPs a token: 2 * heads * head_dim * state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import find_span, tile_pointers
from automodel_kernels.ssd.tiles import (
    BLOCK_TOKENS,
    BLOCKS_IN_CHUNK,
    CHUNK_TOKENS,
    block_totals,
    state_block,
    total_between,
)
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    from automodel_kernels.ssd.tiles import Spans

__all__ = ["chunk_gradients_kernel", "launch_chunk_gradients"]

UNSPECIALIZED = (
    "dy_ptr",
    "c_ptr",
    "decay_ptr",
    "runs_ptr",
    "cu_seqlens_ptr",
    "gradients_ptr",
    "factors_ptr",
    "seqlen",
    "num_seqs",
    "num_heads",
    "heads_per_group",
    "stride_dy_batch",
    "stride_dy_token",
    "stride_dy_head",
    "stride_dy_dim",
    "stride_c_batch",
    "stride_c_token",
    "stride_c_group",
    "stride_c_state",
)


@tuned(
    space=spaces.SSD_CHUNK_GRADIENTS,
    key=("dy_ptr", "HEAD_DIM", "WIDE_STATE", "ALIGNED"),
    outputs=("gradients_ptr", "factors_ptr"),
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_gradients_kernel(
    dy_ptr,
    c_ptr,
    decay_ptr,
    runs_ptr,
    cu_seqlens_ptr,
    gradients_ptr,
    factors_ptr,
    seqlen: tl.int32,
    num_seqs: tl.int32,
    num_heads: tl.int32,
    heads_per_group: tl.int32,
    stride_dy_batch: tl.int64,
    stride_dy_token: tl.int64,
    stride_dy_head: tl.int64,
    stride_dy_dim: tl.int64,
    stride_c_batch: tl.int64,
    stride_c_token: tl.int64,
    stride_c_group: tl.int64,
    stride_c_state: tl.int64,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    WIDE_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (chunk, block of head_dim, head); heads fastest, so that neighbours share C."""
    SLICE_P: tl.constexpr = BLOCK_P if BLOCK_P < HEAD_DIM else HEAD_DIM
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    pid = pid // num_heads
    first_p = pid % (HEAD_DIM // SLICE_P) * SLICE_P
    chunk = pid // (HEAD_DIM // SLICE_P)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, chunk, CHUNK_TOKENS, VARLEN)
    start = begin + index * CHUNK_TOKENS
    if start >= end:
        return
    stop = tl.minimum(start + CHUNK_TOKENS, end)
    row = seq.to(tl.int64) * (0 if VARLEN else 1)

    dy_ptr += row * stride_dy_batch + head * stride_dy_head + first_p.to(tl.int64) * stride_dy_dim
    c_ptr += row * stride_c_batch + head // heads_per_group * stride_c_group
    decay_ptr += (row * num_heads + head) * seqlen
    runs_ptr += row * seqlen
    totals = block_totals(decay_ptr, start, stop)
    offs_p = tl.arange(0, SLICE_P).to(tl.int64)
    offs_n = tl.arange(0, WIDE_STATE).to(tl.int64)
    mask_n = offs_n < STATE_DIM

    local = tl.zeros([SLICE_P, WIDE_STATE], dtype=tl.float32)
    for first in range(start, stop, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        mask_t = offs_t < stop
        seen = mask_t
        if PACKED:
            seen = seen & (tl.load(runs_ptr + offs_t, mask=mask_t, other=1) == 0)
        before = total_between(totals, 0, (first - start) // BLOCK_TOKENS)
        decay = tl.load(decay_ptr + offs_t, mask=mask_t, other=0.0)
        since_start = tl.where(seen, tl.exp(decay + before), 0.0)
        wide_t = offs_t.to(tl.int64)
        dy_ptrs = tile_pointers(dy_ptr, wide_t, stride_dy_token, offs_p, stride_dy_dim, ALIGNED)
        c_ptrs = tile_pointers(c_ptr, wide_t, stride_c_token, offs_n, stride_c_state, ALIGNED)
        dy = tl.load(dy_ptrs, mask=mask_t[:, None], other=0.0).to(tl.float32) * since_start[:, None]
        c = tl.load(c_ptrs, mask=mask_t[:, None] & mask_n[None, :], other=0.0)
        local = tl.dot(tl.trans(dy.to(c.dtype)), c, local, input_precision="ieee")

    state_row = (chunk.to(tl.int64) * num_heads + head) * HEAD_DIM + first_p
    ptrs = tile_pointers(gradients_ptr + state_row * STATE_DIM, offs_p, STATE_DIM, offs_n, 1, STATE_DIM % 8 == 0)
    tl.store(ptrs, local.to(gradients_ptr.dtype.element_ty), mask=mask_n[None, :])
    factor = tl.exp(total_between(totals, 0, BLOCKS_IN_CHUNK))
    if PACKED:
        factor = tl.where(tl.load(runs_ptr + stop - 1) == 0, factor, 0.0)
    if first_p == 0:
        tl.store(factors_ptr + chunk.to(tl.int64) * num_heads + head, factor)


def launch_chunk_gradients(
    dy: torch.Tensor,
    C: torch.Tensor,
    *,
    decay: torch.Tensor,
    runs: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks' own gradients [num_chunks, heads, head_dim, state] in dy's dtype and factors [num_chunks, heads]."""
    num_heads, head_dim = dy.shape[2:]
    num_groups, state_dim = C.shape[2:]
    gradients = torch.empty(spans.num_chunks, num_heads, head_dim, state_dim, dtype=dy.dtype, device=dy.device)
    factors = torch.empty(spans.num_chunks, num_heads, dtype=torch.float32, device=dy.device)
    chunk_gradients_kernel[lambda meta: (spans.num_chunks * max(1, head_dim // meta["BLOCK_P"]) * num_heads,)](
        dy,
        C,
        decay,
        decay if runs is None else runs,
        decay if cu_seqlens is None else cu_seqlens,
        gradients,
        factors,
        spans.seqlen,
        spans.num_seqs,
        num_heads,
        num_heads // num_groups,
        *dy.stride(),
        *C.stride(),
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        WIDE_STATE=state_block(state_dim),
        PACKED=runs is not None,
        VARLEN=cu_seqlens is not None,
        ALIGNED=tensors_aligned(dy, C),
    )
    return gradients, factors
