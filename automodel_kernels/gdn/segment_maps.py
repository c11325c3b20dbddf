"""What a segment of a sequence does to any state, so that the segments of a long sequence can be walked at once.

The walk of `scan` is affine in the state: a segment takes S to map S + offset, with a map [K, K] and an offset [K, V]
of its own. Columns of the state do not meet, so the same walk gives both without any output: the offset from a state of
0, and the map's columns from those of the identity with v = 0.

    maps [segments, value heads, K, K] in q's dtype, as operands   offsets [segments, value heads, K, V] fp32

The last segment of a sequence has neither. `scan` brings a state to a segment by the maps of those before it, each a
product as large as a third of one chunk's. The walk here has K more columns but neither q nor o, so that n segments are
about n / 2 times faster than one if there are processors for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.scan import chunk_decay, solve, weigh
from automodel_kernels.gdn.tiles import find_span, load_beta, load_rate, load_rated_gate, load_tile, tile_pointers
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from automodel_kernels.gdn.tiles import Spans

__all__ = ["SegmentMaps", "segment_maps", "segment_maps_kernel"]


@dataclass(frozen=True, kw_only=True)
class SegmentMaps:
    """S after a segment = maps S + offsets; nothing is written for a sequence's last segment.

    Attributes:
        maps: [segments, value heads, K, K] in q's dtype.
        offsets: [segments, value heads, K, V] fp32.
    """

    maps: torch.Tensor
    offsets: torch.Tensor


@tuned(
    space=spaces.GDN_SEGMENT_MAPS,
    key=("k_ptr", "HEAD_K", "HEAD_V", "BLOCK_K", "CHUNK", "VARLEN", "ALIGNED"),
    outputs=("maps_ptr", "offsets_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "k_ptr",
        "v_ptr",
        "g_ptr",
        "beta_ptr",
        "A_log_ptr",
        "dt_bias_ptr",
        "cu_seqlens_ptr",
        "inverse_ptr",
        "k_rstd_ptr",
        "maps_ptr",
        "offsets_ptr",
        "num_seqs",
        "seqlen",
        "segment",
        "num_heads",
        "num_value_heads",
        "stride_k_batch",
        "stride_k_token",
        "stride_k_head",
        "stride_k_dim",
        "stride_v_batch",
        "stride_v_token",
        "stride_v_head",
        "stride_v_dim",
        "stride_g_batch",
        "stride_g_token",
        "stride_g_head",
        "stride_beta_batch",
        "stride_beta_token",
        "stride_beta_head",
    ]
)
def segment_maps_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    inverse_ptr,
    k_rstd_ptr,
    maps_ptr,
    offsets_ptr,
    num_seqs: tl.int32,
    seqlen: tl.int32,
    segment: tl.int32,
    num_heads: tl.int32,
    num_value_heads: tl.int32,
    stride_k_batch: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_k_dim: tl.int64,
    stride_v_batch: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_v_dim: tl.int64,
    stride_g_batch: tl.int64,
    stride_g_token: tl.int64,
    stride_g_head: tl.int64,
    stride_beta_batch: tl.int64,
    stride_beta_token: tl.int64,
    stride_beta_head: tl.int64,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    L2NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A segment of one value head and a block of the columns [V | K]; see the module."""
    pid = tl.program_id(0)
    # Blocks of the columns [V | K].
    blocks_v = (HEAD_V + BLOCK_V - 1) // BLOCK_V
    blocks = blocks_v + (HEAD_K + BLOCK_V - 1) // BLOCK_V
    value_head = (pid // blocks % num_value_heads).to(tl.int64)
    number = pid // blocks // num_value_heads
    head = value_head // (num_value_heads // num_heads)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, segment, VARLEN)
    first = begin + index * segment
    last = first + segment

    if last < end:
        block = pid % blocks
        of_map = block >= blocks_v
        first_column = (block - tl.where(of_map, blocks_v, 0)) * BLOCK_V
        offs_c = tl.arange(0, CHUNK)
        offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
        offs_column = (first_column + tl.arange(0, BLOCK_V)).to(tl.int64)
        mask_k = offs_k < HEAD_K
        state = tl.where(of_map & (offs_k[:, None] == offs_column[None, :]), 1.0, 0.0)

        row = (seq * 0 if VARLEN else seq).to(tl.int64)
        k_ptr += row * stride_k_batch + head * stride_k_head
        v_ptr += row * stride_v_batch + value_head * stride_v_head
        g_ptr += row * stride_g_batch + value_head * stride_g_head
        beta_ptr += row * stride_beta_batch + value_head * stride_beta_head
        inverse_ptr += (row * num_value_heads + value_head) * seqlen * CHUNK
        rstd_row = row * seqlen * num_heads + head
        rate, bias = load_rate(A_log_ptr, dt_bias_ptr, value_head, HAS_GATE, HAS_GATE_BIAS)
        for start in range(first, last, CHUNK):
            # A segment that is not the last has whole chunks.
            offs_t = (start + offs_c).to(tl.int64)
            mask_t = offs_t < end
            mask_v = mask_t & (block < blocks_v)
            k = load_tile(k_ptr, offs_t, stride_k_token, mask_t, 0, stride_k_dim, HEAD_K, BLOCK_K, ALIGNED)
            v = load_tile(v_ptr, offs_t, stride_v_token, mask_v, first_column, stride_v_dim, HEAD_V, BLOCK_V, ALIGNED)
            inverse = load_tile(inverse_ptr, offs_t, CHUNK, mask_t, 0, 1, CHUNK, CHUNK, True)
            g = load_rated_gate(g_ptr, offs_t, stride_g_token, mask_t, rate, bias, HAS_GATE)
            _, _, since_start, to_end, whole = chunk_decay(g)
            beta = load_beta(beta_ptr, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
            if L2NORM:
                k_rstd = tl.load(k_rstd_ptr + rstd_row + offs_t * num_heads, mask=mask_t, other=0.0)
                since_start *= k_rstd
                to_end *= k_rstd
            d = solve(state.to(k.dtype), k, v.to(tl.float32), inverse, since_start, beta)
            state = tl.dot(tl.trans(k), weigh(d, to_end, k.dtype), state * whole, input_precision="ieee")

        slot = number * num_value_heads + value_head
        if of_map:
            map_ptrs = tile_pointers(maps_ptr + slot * HEAD_K * HEAD_K, offs_k, HEAD_K, offs_column, 1, HEAD_K % 8 == 0)
            mask = mask_k[:, None] & (offs_column < HEAD_K)[None, :]
            tl.store(map_ptrs, state.to(maps_ptr.dtype.element_ty), mask=mask)
        else:
            offset_ptrs = tile_pointers(
                offsets_ptr + slot * HEAD_K * HEAD_V, offs_k, HEAD_V, offs_column, 1, HEAD_V % 8 == 0
            )
            tl.store(offset_ptrs, state, mask=mask_k[:, None] & (offs_column < HEAD_V)[None, :])


def segment_maps(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    inverse: torch.Tensor,
    k_rstd: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    beta_sigmoid: bool,
    neg_eigval: bool,
    spans: Spans,
    aligned: bool,
) -> SegmentMaps:
    """Launches the kernel: the maps of all segments but each sequence's last."""
    seqlen, heads, head_k = k.shape[1:]
    value_heads, head_v = v.shape[2:]
    maps = k.new_empty(spans.num_segments, value_heads, head_k, head_k)
    offsets = k.new_empty(spans.num_segments, value_heads, head_k, head_v, dtype=torch.float32)

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        blocks = triton.cdiv(head_v, meta["BLOCK_V"]) + triton.cdiv(head_k, meta["BLOCK_V"])
        return (spans.num_segments * value_heads * blocks,)

    segment_maps_kernel[grid](
        k,
        v,
        g,
        beta,
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        k if cu_seqlens is None else cu_seqlens,
        inverse,
        offsets if k_rstd is None else k_rstd,
        maps,
        offsets,
        spans.num_seqs,
        seqlen,
        spans.segment,
        heads,
        value_heads,
        *k.stride(),
        *v.stride(),
        *g.stride(),
        *beta.stride(),
        HEAD_K=head_k,
        HEAD_V=head_v,
        BLOCK_K=triton.next_power_of_2(head_k),
        CHUNK=spans.chunk,
        L2NORM=k_rstd is not None,
        HAS_GATE=A_log is not None,
        HAS_GATE_BIAS=dt_bias is not None,
        BETA_SIGMOID=beta_sigmoid,
        NEG_EIGVAL=neg_eigval,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
    )
    return SegmentMaps(maps=maps, offsets=offsets)
