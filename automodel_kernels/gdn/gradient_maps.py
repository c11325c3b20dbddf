"""What a segment does to the gradient of a state that passes through it in reverse, where sequences are split.

    G entering = A G leaving + b        A [K, K], b [K, V]

Both are columns of the walk of `gradient_scan`: b starts from zero, A from the identity and without do. A program
walks through one segment with a block of columns of b or of A; a sequence's first segment has no use for its map. A is
kept in q's dtype, as G is rounded to it in every product; b in fp32.

FLOPs a token and value head: 2 (K (CHUNK + 3 C) + 2 CHUNK C) with C = K + V columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.gradient_scan import UNSPECIALIZED_STEP, gradient_step
from automodel_kernels.gdn.tiles import find_span, load_beta, load_rate, load_rated_gate, tile_pointers
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from automodel_kernels.gdn.gradient_scan import Inputs

__all__ = ["gradient_maps", "gradient_maps_kernel"]


@tuned(
    space=spaces.GDN_GRADIENT_MAPS,
    key=("q_ptr", "HEAD_K", "HEAD_V", "BLOCK_K", "CHUNK", "VARLEN", "ALIGNED"),
    outputs=("maps_ptr", "offsets_ptr"),
)
@triton.jit(do_not_specialize=[*UNSPECIALIZED_STEP, "maps_ptr", "offsets_ptr"])
def gradient_maps_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    g_ptr,
    beta_ptr,
    inverse_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    A_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    maps_ptr,
    offsets_ptr,
    scale: tl.float32,
    seqlen: tl.int32,
    num_seqs: tl.int32,
    num_heads: tl.int32,
    num_value_heads: tl.int32,
    segment: tl.int32,
    stride_q_batch: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_q_dim: tl.int64,
    stride_k_batch: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_k_dim: tl.int64,
    stride_do_batch: tl.int64,
    stride_do_token: tl.int64,
    stride_do_head: tl.int64,
    stride_do_dim: tl.int64,
    stride_g_batch: tl.int64,
    stride_g_token: tl.int64,
    stride_g_head: tl.int64,
    stride_beta_batch: tl.int64,
    stride_beta_token: tl.int64,
    stride_beta_head: tl.int64,
    CHUNK: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A segment of one value head and a block of columns of [V | K], in reverse; see the module."""
    # Heads fastest, then the columns [V | K].
    pid = tl.program_id(0)
    value_head = (pid % num_value_heads).to(tl.int64)
    head = value_head // (num_value_heads // num_heads)
    pid = pid // num_value_heads
    blocks_v: tl.constexpr = (HEAD_V + BLOCK_V - 1) // BLOCK_V
    blocks: tl.constexpr = blocks_v + (HEAD_K + BLOCK_V - 1) // BLOCK_V
    block = pid % blocks
    number = pid // blocks
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, segment, VARLEN)
    start = begin + index * segment
    if (index == 0) | (start >= end):
        return
    row = seq.to(tl.int64) if not VARLEN else tl.zeros([], dtype=tl.int64)
    # Tokens are counted from the segment's first, which leaves less to know in the loop.
    first = start.to(tl.int64)
    token = row * seqlen + first
    q_ptr += row * stride_q_batch + first * stride_q_token + head * stride_q_head
    k_ptr += row * stride_k_batch + first * stride_k_token + head * stride_k_head
    do_ptr += row * stride_do_batch + first * stride_do_token + value_head * stride_do_head
    g_ptr += row * stride_g_batch + first * stride_g_token + value_head * stride_g_head
    beta_ptr += row * stride_beta_batch + first * stride_beta_token + value_head * stride_beta_head
    inverse_ptr += ((row * num_value_heads + value_head) * seqlen + first) * CHUNK
    q_rstd_ptr += token * num_heads + head
    k_rstd_ptr += token * num_heads + head
    rate, bias = load_rate(A_log_ptr, dt_bias_ptr, value_head, HAS_GATE, HAS_GATE_BIAS)

    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    is_offset = block < blocks_v
    first_v = block * BLOCK_V
    offs_c = tl.where(is_offset, first_v, first_v - blocks_v * BLOCK_V) + tl.arange(0, BLOCK_V)
    identity = (offs_k[:, None] == offs_c[None, :]) & (not is_offset)
    gradient = tl.where(identity, 1.0, 0.0)
    length = tl.minimum(segment, end - start)
    num_chunks = tl.cdiv(length, CHUNK)
    for step in range(num_chunks):
        tokens = (num_chunks - 1 - step) * CHUNK + tl.arange(0, CHUNK)
        mask_t = tokens < length
        offs_t = tokens.to(tl.int64)
        g = load_rated_gate(g_ptr, offs_t, stride_g_token, mask_t, rate, bias, HAS_GATE)
        beta = load_beta(beta_ptr, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
        gradient, _ = gradient_step(
            gradient,
            q_ptr,
            k_ptr,
            do_ptr,
            inverse_ptr,
            q_rstd_ptr,
            k_rstd_ptr,
            g,
            beta,
            offs_t,
            mask_t,
            mask_t & is_offset,
            scale,
            first_v,
            stride_q_token,
            stride_q_dim,
            stride_k_token,
            stride_k_dim,
            stride_do_token,
            stride_do_dim,
            num_heads,
            CHUNK,
            HEAD_K,
            HEAD_V,
            BLOCK_K,
            BLOCK_V,
            L2NORM,
            ALIGNED,
        )

    state = (number.to(tl.int64) * num_value_heads + value_head) * HEAD_K
    if is_offset:
        offset_ptrs = tile_pointers(offsets_ptr + state * HEAD_V, offs_k, HEAD_V, offs_c, 1, HEAD_V % 8 == 0)
        tl.store(offset_ptrs, gradient, mask=(offs_k < HEAD_K)[:, None] & (offs_c < HEAD_V)[None, :])
    else:
        map_ptrs = tile_pointers(maps_ptr + state * HEAD_K, offs_k, HEAD_K, offs_c, 1, HEAD_K % 8 == 0)
        mask = (offs_k < HEAD_K)[:, None] & (offs_c < HEAD_K)[None, :]
        tl.store(map_ptrs, gradient.to(maps_ptr.dtype.element_ty), mask=mask)


def gradient_maps(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel.

    Returns:
        The matrices [num_segments, HV, K, K] in q's dtype and offsets [num_segments, HV, K, V] in fp32; those of a
        sequence's first segment are undefined.
    """
    num_value_heads, head_v = inputs.v.shape[2:]
    head_k, num_segments = inputs.q.shape[3], inputs.spans.num_segments
    maps = inputs.state_like(num_segments, columns=head_k, dtype=inputs.q.dtype)
    offsets = inputs.state_like(num_segments, columns=head_v, dtype=torch.float32)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(head_v, meta["BLOCK_V"]) + triton.cdiv(head_k, meta["BLOCK_V"])
        return (num_segments * blocks * num_value_heads,)

    gradient_maps_kernel[grid](*inputs.arguments(), maps, offsets, *inputs.sizes(), **inputs.flags())
    return maps, offsets
