"""The walk through the chunks of a sequence with the state in registers: outputs, kept states, final states.

For a chunk of one value head, with G_t the sum of g up to and with t, E_ts = exp(G_t - G_s), and S its first state:

    d = inverse [beta (v - exp(G) k S)]                        what each token writes to the state
    o = scale [exp(G) q S + (q k^T o E) d]                     E taken for s <= t
    S <- exp(G_last) S + k^T [exp(G_last - G) d]

    q, k [batch, seqlen, heads, K]   v, o [batch, seqlen, value heads, V]   g, beta [batch, seqlen, value heads]
    inverse [batch, value heads, seqlen, CHUNK]   states [chunks, value heads, K, V]
    final [sequences, value heads, K, V] fp32

Columns of S do not meet, so a program has a block of V; and a segment of the sequence, usually all of it. Before the
walk it brings the state to the segment's beginning through the maps of the segments before it (`segment_maps`). S is
fp32 and enters products in q's dtype; all sums are fp32. With L2NORM the norms of q and k join the factors of tokens,
so that q and k go into products as they are. With SAVE the state at each chunk's start is kept in q's dtype.

Bytes a token, 2-byte types: 4 K heads + (4 V + 2 CHUNK + 8) value heads, and with SAVE 2 K V / CHUNK for each of them.
FLOPs a token and value head: 6 K V + 4 CHUNK V + 2 CHUNK K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.tiles import (
    find_span,
    gate_parts,
    load_beta,
    load_rate,
    load_rated_gate,
    load_tile,
    pair_decay,
    spans_before,
    tile_pointers,
)
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from automodel_kernels.gdn.segment_maps import SegmentMaps
    from automodel_kernels.gdn.tiles import Spans

__all__ = ["chunk_decay", "scan", "scan_kernel", "solve", "weigh"]

LARGEST_FLOAT16 = tl.constexpr(65504.0)


@triton.jit
def load_state(
    initial_ptr,
    offs_k,
    stride_k,
    offs_v,
    stride_v,
    mask_kv,
    HAS_INITIAL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Columns of an initial state [K, V] in fp32; 0 without one."""
    state = tl.zeros(mask_kv.shape, dtype=tl.float32)
    if HAS_INITIAL:
        ptrs = tile_pointers(initial_ptr, offs_k, stride_k, offs_v, stride_v, ALIGNED)
        state += tl.load(ptrs, mask=mask_kv, other=0.0).to(tl.float32)
    return state


@triton.jit
def apply_map(
    state,
    map_ptr,
    offset,
    offs_k,
    mask_k,
    HEAD_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The map S + offset in fp32, for a map [K, K] at map_ptr, of which no more than 32 KiB are on chip at a time."""
    dtype = map_ptr.dtype.element_ty
    PIECE: tl.constexpr = 32 if dtype == tl.float32 else (64 if BLOCK_K > 128 else BLOCK_K)
    result = offset
    pieces = tl.reshape(state, (BLOCK_K // PIECE, PIECE, BLOCK_V))
    for number in tl.static_range(BLOCK_K // PIECE):
        piece = state
        if PIECE < BLOCK_K:
            here = tl.arange(0, BLOCK_K // PIECE)[:, None, None] == number
            piece = tl.sum(tl.where(here, pieces, 0.0), axis=0)
        offs_piece = number * PIECE + tl.arange(0, PIECE)
        ptrs = tile_pointers(map_ptr, offs_k, HEAD_K, offs_piece, 1, HEAD_K % 8 == 0)
        columns = tl.load(ptrs, mask=mask_k[:, None] & (offs_piece < HEAD_K)[None, :], other=0.0)
        result = tl.dot(columns, piece.to(dtype), result, input_precision="ieee")
    return result


@triton.jit
def chunk_decay(g):
    """The gate sums of a chunk, high and low, and as decay those since its start, those to its end and the whole.

    Returns high, low, exp(G), exp(G_last - G) [CHUNK] and the scalar exp(G_last).
    """
    high_part, low_part = gate_parts(g)
    high, low = tl.cumsum(high_part, axis=0), tl.cumsum(low_part, axis=0)
    high_last, low_last = tl.sum(high_part, axis=0), tl.sum(low_part, axis=0)
    return high, low, tl.exp(high + low), tl.exp((high_last - high) + (low_last - low)), tl.exp(high_last + low_last)


@triton.jit
def solve(state, k, v, inverse, since_start, beta):
    """d = inverse [beta (v - since_start k S)] in fp32 [CHUNK, columns]; since_start holds the norm of k, too.

    `state` is S in k's dtype, `v` fp32.
    """
    read = tl.dot(k, state, input_precision="ieee")
    wanted = beta[:, None] * (v - since_start[:, None] * read)
    return tl.dot(inverse, wanted.to(k.dtype), input_precision="ieee")


@triton.jit
def weigh(d, to_end, dtype: tl.constexpr):
    """to_end d, what k^T adds to the state, in k's dtype; to_end holds the norm of k, too."""
    written = to_end[:, None] * d
    if dtype == tl.float16:
        # The norm of a key near 0 is up to 1000: infinity times such a key would be NaN.
        written = tl.minimum(written, LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
        written = tl.maximum(written, -LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
    return written.to(dtype)


@triton.jit
def weigh_pairs(products, high, low, k_rstd, mask, dtype: tl.constexpr, L2NORM: tl.constexpr):
    """q k^T with the decay and the norm of k in it, 0 where masked; in the dtype."""
    if dtype == tl.float32:
        pairs = products * pair_decay(high[:, None], low[:, None], high[None, :], low[None, :], mask)
        if L2NORM:
            pairs *= k_rstd[None, :]
    else:
        # Where 16 bits remain, one exponent a token saves the registers of two more values for every column.
        to_t = high + low
        from_s = high + low
        if L2NORM:
            from_s -= tl.log(k_rstd)
        pairs = products * tl.exp(tl.where(mask, to_t[:, None] - from_s[None, :], -float("inf")))
    return pairs.to(dtype)


@tuned(
    space=spaces.GDN_SCAN,
    key=("q_ptr", "HEAD_K", "HEAD_V", "BLOCK_K", "CHUNK", "VARLEN", "ALIGNED"),
    outputs=("out_ptr", "states_ptr", "final_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "q_ptr",
        "k_ptr",
        "v_ptr",
        "g_ptr",
        "beta_ptr",
        "A_log_ptr",
        "dt_bias_ptr",
        "cu_seqlens_ptr",
        "initial_ptr",
        "inverse_ptr",
        "q_rstd_ptr",
        "k_rstd_ptr",
        "maps_ptr",
        "offsets_ptr",
        "out_ptr",
        "states_ptr",
        "final_ptr",
        "scale",
        "num_seqs",
        "seqlen",
        "segment",
        "num_heads",
        "num_value_heads",
        "stride_q_batch",
        "stride_q_token",
        "stride_q_head",
        "stride_q_dim",
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
        "stride_initial_seq",
        "stride_initial_head",
        "stride_initial_k",
        "stride_initial_v",
    ]
)
def scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    inverse_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    maps_ptr,
    offsets_ptr,
    out_ptr,
    states_ptr,
    final_ptr,
    scale: tl.float32,
    num_seqs: tl.int32,
    seqlen: tl.int32,
    segment: tl.int32,
    num_heads: tl.int32,
    num_value_heads: tl.int32,
    stride_q_batch: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_q_dim: tl.int64,
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
    stride_initial_seq: tl.int64,
    stride_initial_head: tl.int64,
    stride_initial_k: tl.int64,
    stride_initial_v: tl.int64,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    L2NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A segment of one value head and a block of columns of V; see the module."""
    pid = tl.program_id(0)
    blocks = (HEAD_V + BLOCK_V - 1) // BLOCK_V
    value_head = (pid // blocks % num_value_heads).to(tl.int64)
    number = pid // blocks // num_value_heads
    head = value_head // (num_value_heads // num_heads)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, segment, VARLEN)

    # The program's columns of a state [K, V].
    first_v = pid % blocks * BLOCK_V
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    offs_v = (first_v + tl.arange(0, BLOCK_V)).to(tl.int64)
    mask_k = offs_k < HEAD_K
    mask_v = offs_v < HEAD_V
    mask_kv = mask_k[:, None] & mask_v[None, :]
    initial_ptr += value_head * stride_initial_head

    if VARLEN:
        # A document without tokens has no segment; there are at least as many programs as documents.
        empty_begin = tl.load(cu_seqlens_ptr + number, mask=number < num_seqs, other=0)
        empty_end = tl.load(cu_seqlens_ptr + number + 1, mask=number < num_seqs, other=1)
        mask_empty = mask_kv & (empty_begin == empty_end)
        initial_row = initial_ptr + number * stride_initial_seq
        state = load_state(
            initial_row, offs_k, stride_initial_k, offs_v, stride_initial_v, mask_empty, HAS_INITIAL, ALIGNED
        )
        final_row = final_ptr + (number * num_value_heads + value_head) * HEAD_K * HEAD_V
        tl.store(tile_pointers(final_row, offs_k, HEAD_V, offs_v, 1, HEAD_V % 8 == 0), state, mask=mask_empty)

    first = index * segment
    length = end - begin
    if first < length:
        initial_row = initial_ptr + seq * stride_initial_seq
        state = load_state(
            initial_row, offs_k, stride_initial_k, offs_v, stride_initial_v, mask_kv, HAS_INITIAL, ALIGNED
        )
        for past in range(index):
            slot = (number - index + past) * num_value_heads + value_head
            map_row = maps_ptr + slot * HEAD_K * HEAD_K
            offset_row = offsets_ptr + slot * HEAD_K * HEAD_V
            offset_ptrs = tile_pointers(offset_row, offs_k, HEAD_V, offs_v, 1, HEAD_V % 8 == 0)
            offset = tl.load(offset_ptrs, mask=mask_kv, other=0.0)
            state = apply_map(state, map_row, offset, offs_k, mask_k, HEAD_K, BLOCK_K, BLOCK_V)

        # Tokens are counted from the sequence's own begin, which costs fewer registers than to know it in the loop.
        row = (seq * 0 if VARLEN else seq).to(tl.int64)
        token = row * seqlen + begin
        q_ptr += row * stride_q_batch + begin * stride_q_token + head * stride_q_head
        k_ptr += row * stride_k_batch + begin * stride_k_token + head * stride_k_head
        v_ptr += row * stride_v_batch + begin * stride_v_token + value_head * stride_v_head
        g_ptr += row * stride_g_batch + begin * stride_g_token + value_head * stride_g_head
        beta_ptr += row * stride_beta_batch + begin * stride_beta_token + value_head * stride_beta_head
        inverse_ptr += ((row * num_value_heads + value_head) * seqlen + begin) * CHUNK
        out_ptr += (token * num_value_heads + value_head) * HEAD_V
        stride_out_token = num_value_heads * HEAD_V
        q_rstd_ptr += token * num_heads + head
        k_rstd_ptr += token * num_heads + head
        rate, bias = load_rate(A_log_ptr, dt_bias_ptr, value_head, HAS_GATE, HAS_GATE_BIAS)
        if SAVE:
            kept = spans_before(cu_seqlens_ptr, seqlen, seq, CHUNK, VARLEN) + index * (segment // CHUNK)
            states_ptr += (kept.to(tl.int64) * num_value_heads + value_head) * HEAD_K * HEAD_V
        last = tl.minimum(first + segment, length)
        for start in range(first, last, CHUNK):
            tokens = start + tl.arange(0, CHUNK)
            mask_t = tokens < length
            offs_t = tokens.to(tl.int64)
            k = load_tile(k_ptr, offs_t, stride_k_token, mask_t, 0, stride_k_dim, HEAD_K, BLOCK_K, ALIGNED)
            q = load_tile(q_ptr, offs_t, stride_q_token, mask_t, 0, stride_q_dim, HEAD_K, BLOCK_K, ALIGNED)
            v = load_tile(v_ptr, offs_t, stride_v_token, mask_t, first_v, stride_v_dim, HEAD_V, BLOCK_V, ALIGNED)
            inverse = load_tile(inverse_ptr, offs_t, CHUNK, mask_t, 0, 1, CHUNK, CHUNK, True)
            g = load_rated_gate(g_ptr, offs_t, stride_g_token, mask_t, rate, bias, HAS_GATE)
            beta = load_beta(beta_ptr, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
            high, low, since_start, to_end, whole = chunk_decay(g)
            out_factor = tl.zeros_like(g) + scale
            k_rstd = since_start
            if L2NORM:
                k_rstd = tl.load(k_rstd_ptr + offs_t * num_heads, mask=mask_t, other=1.0)
                out_factor *= tl.load(q_rstd_ptr + offs_t * num_heads, mask=mask_t, other=1.0)
                to_end *= k_rstd

            narrow = state.to(k.dtype)
            if SAVE:
                state_ptrs = tile_pointers(states_ptr, offs_k, HEAD_V, offs_v, 1, HEAD_V % 8 == 0)
                tl.store(state_ptrs, narrow, mask=mask_kv)
                states_ptr += num_value_heads.to(tl.int64) * HEAD_K * HEAD_V
            d = solve(narrow, k, v.to(tl.float32), inverse, since_start * k_rstd if L2NORM else since_start, beta)
            written = weigh(d, to_end, k.dtype)
            narrow_d = d.to(k.dtype)
            out = tl.dot(q, narrow, input_precision="ieee") * since_start[:, None]
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            pairs = weigh_pairs(products, high, low, k_rstd, tokens[:, None] >= tokens[None, :], k.dtype, L2NORM)
            out = tl.dot(pairs, narrow_d, out, input_precision="ieee") * out_factor[:, None]
            out_ptrs = tile_pointers(out_ptr, offs_t, stride_out_token, offs_v, 1, HEAD_V % 8 == 0)
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_v[None, :])
            state = tl.dot(tl.trans(k), written, state * whole, input_precision="ieee")
        if last == length:
            final_row = final_ptr + (seq * num_value_heads + value_head) * HEAD_K * HEAD_V
            tl.store(tile_pointers(final_row, offs_k, HEAD_V, offs_v, 1, HEAD_V % 8 == 0), state, mask=mask_kv)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    inverse: torch.Tensor,
    q_rstd: torch.Tensor | None,
    k_rstd: torch.Tensor | None,
    maps: SegmentMaps | None,
    scale: float,
    initial_state: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    beta_sigmoid: bool,
    neg_eigval: bool,
    spans: Spans,
    aligned: bool,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launches the kernel.

    Returns:
        o [batch, seqlen, value heads, V] in v's dtype, the final states [sequences, value heads, K, V] fp32, and with
        `save` the states at the chunks' starts [chunks, value heads, K, V] in q's dtype.
    """
    batch, seqlen, heads, head_k = q.shape
    value_heads, head_v = v.shape[2:]
    out = v.new_empty(batch, seqlen, value_heads, head_v)
    final = q.new_empty(spans.num_seqs, value_heads, head_k, head_v, dtype=torch.float32)
    states = q.new_empty(spans.num_chunks, value_heads, head_k, head_v) if save else None

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (spans.num_segments * value_heads * triton.cdiv(head_v, meta["BLOCK_V"]),)

    scan_kernel[grid](
        q,
        k,
        v,
        g,
        beta,
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        q if cu_seqlens is None else cu_seqlens,
        final if initial_state is None else initial_state,
        inverse,
        final if q_rstd is None else q_rstd,
        final if k_rstd is None else k_rstd,
        inverse if maps is None else maps.maps,
        final if maps is None else maps.offsets,
        out,
        inverse if states is None else states,
        final,
        scale,
        spans.num_seqs,
        seqlen,
        spans.segment,
        heads,
        value_heads,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *g.stride(),
        *beta.stride(),
        *(final if initial_state is None else initial_state).stride(),
        HEAD_K=head_k,
        HEAD_V=head_v,
        BLOCK_K=triton.next_power_of_2(head_k),
        CHUNK=spans.chunk,
        L2NORM=q_rstd is not None,
        HAS_GATE=A_log is not None,
        HAS_GATE_BIAS=dt_bias is not None,
        BETA_SIGMOID=beta_sigmoid,
        NEG_EIGVAL=neg_eigval,
        HAS_INITIAL=initial_state is not None,
        SAVE=states is not None,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
    )
    return out, final, states
