"""The gradients of the states between chunks, from the last chunk to the first, and with them those of the values.

With G [K, V] the gradient of the state that leaves a chunk, other names as in `chunk_inverse` and `scan`:

    dd_s = scale sum_{t >= s} E_ts (q_t . k_s) do_t + exp(G_Q - G_s) G^T k_s        e = Tm^T dd        dv = beta e
    G entering = exp(G_Q) G + scale sum_t exp(G_t) q_t do_t^T - sum_t exp(G_t) beta_t k_t e_t^T

where G_t with an index is the sum of log gates, and the last G is the final state's gradient, or zero. e is the
gradient of beta (v - exp(G_t) S^T k), dd that of d. Neither the states nor v are needed.

A program walks through the chunks of a sequence or segment in reverse and holds G [K, BLOCK_V] in fp32. It keeps the G
that leaves each chunk in q's dtype, [num_chunks, HV, K, V], for `chunk_backward`, and writes dv. Where sequences are
split, it first composes the affine maps of the later segments (`gradient_maps`): G = A G + b.

Products take tiles in q's dtype and add in fp32. The norms of q and k are factors of rows and columns, in fp32.

Bytes a token (2 an element): q, k: 4 K H; do, dv: 4 V HV; inverse: 2 CHUNK HV; G: 2 K V HV / CHUNK. FLOPs a token and
value head: 2 (K (CHUNK + 3 V) + 2 CHUNK V).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.scan import apply_map, weigh
from automodel_kernels.gdn.tiles import (
    find_span,
    gate_parts,
    gate_sums,
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
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    from automodel_kernels.gdn.tiles import Spans

__all__ = ["UNSPECIALIZED_STEP", "Inputs", "gradient_scan", "gradient_scan_kernel", "gradient_step"]

UNSPECIALIZED_STEP = (
    "q_ptr",
    "k_ptr",
    "do_ptr",
    "g_ptr",
    "beta_ptr",
    "inverse_ptr",
    "q_rstd_ptr",
    "k_rstd_ptr",
    "A_log_ptr",
    "dt_bias_ptr",
    "cu_seqlens_ptr",
    "scale",
    "seqlen",
    "num_seqs",
    "num_heads",
    "num_value_heads",
    "segment",
    "stride_q_batch",
    "stride_q_token",
    "stride_q_head",
    "stride_q_dim",
    "stride_k_batch",
    "stride_k_token",
    "stride_k_head",
    "stride_k_dim",
    "stride_do_batch",
    "stride_do_token",
    "stride_do_head",
    "stride_do_dim",
    "stride_g_batch",
    "stride_g_token",
    "stride_g_head",
    "stride_beta_batch",
    "stride_beta_token",
    "stride_beta_head",
)


@triton.jit
def gradient_step(
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
    mask_do,
    scale,
    first_v,
    stride_q_token,
    stride_q_dim,
    stride_k_token,
    stride_k_dim,
    stride_do_token,
    stride_do_dim,
    num_heads,
    CHUNK: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L2NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One chunk: the gradient [BLOCK_K, BLOCK_V] of the state that enters it, from that of the state that leaves it,
    and dv [CHUNK, BLOCK_V]; both fp32.

    Pointers point at token 0 of the row and head. g and beta [CHUNK] are fp32 and 0 where mask_t is. do counts as 0
    where mask_do is.
    """
    high, low = gate_sums(g)
    high_parts, low_parts = gate_parts(g)
    total_high, total_low = tl.sum(high_parts, axis=0), tl.sum(low_parts, axis=0)
    since_start = tl.exp(high + low)
    until_end = tl.exp((total_high - high) + (total_low - low))
    if L2NORM:
        q_rstd = tl.load(q_rstd_ptr + offs_t * num_heads, mask=mask_t, other=0.0)
        k_rstd = tl.load(k_rstd_ptr + offs_t * num_heads, mask=mask_t, other=0.0)
    else:
        q_rstd = tl.where(mask_t, 1.0, 0.0)
        k_rstd = q_rstd

    q = load_tile(q_ptr, offs_t, stride_q_token, mask_t, 0, stride_q_dim, HEAD_K, BLOCK_K, ALIGNED)
    k = load_tile(k_ptr, offs_t, stride_k_token, mask_t, 0, stride_k_dim, HEAD_K, BLOCK_K, ALIGNED)
    do = load_tile(do_ptr, offs_t, stride_do_token, mask_do, first_v, stride_do_dim, HEAD_V, BLOCK_V, ALIGNED)
    # Rows s, columns t, so that the product with do needs no transposition.
    offs_c = tl.arange(0, CHUNK)
    later = offs_c[:, None] <= offs_c[None, :]
    decay = pair_decay(high[None, :], low[None, :], high[:, None], low[:, None], later)
    pairs = tl.dot(k, tl.trans(q), input_precision="ieee")
    pairs = pairs * decay * k_rstd[:, None] * (scale * q_rstd)[None, :]
    dd = tl.dot(k, gradient.to(k.dtype), input_precision="ieee") * (until_end * k_rstd)[:, None]
    dd = tl.dot(pairs.to(k.dtype), do, dd, input_precision="ieee")

    inverse = load_tile(inverse_ptr, offs_t, CHUNK, mask_t, 0, 1, CHUNK, CHUNK, True)
    e = tl.dot(tl.trans(inverse), dd.to(k.dtype), input_precision="ieee")
    dv = e * beta[:, None]
    gradient = gradient * tl.exp(total_high + total_low)
    outer = weigh(do.to(tl.float32), scale * since_start * q_rstd, k.dtype)
    gradient = tl.dot(tl.trans(q), outer, gradient, input_precision="ieee")
    outer = weigh(dv, -since_start * k_rstd, k.dtype)
    gradient = tl.dot(tl.trans(k), outer, gradient, input_precision="ieee")
    return gradient, dv


@tuned(
    space=spaces.GDN_GRADIENT_SCAN,
    key=("q_ptr", "HEAD_K", "HEAD_V", "BLOCK_K", "CHUNK", "HAS_INITIAL", "VARLEN", "ALIGNED"),
    outputs=("dv_ptr", "gradients_ptr", "dinitial_ptr"),
)
@triton.jit(
    do_not_specialize=[
        *UNSPECIALIZED_STEP,
        "maps_ptr",
        "offsets_ptr",
        "dfinal_ptr",
        "dv_ptr",
        "gradients_ptr",
        "dinitial_ptr",
    ]
)
def gradient_scan_kernel(
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
    dfinal_ptr,
    dv_ptr,
    gradients_ptr,
    dinitial_ptr,
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
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A segment of one value head and a block of columns of V, in reverse; see the module."""
    # Heads fastest: neighbours share q and k.
    pid = tl.program_id(0)
    value_head = (pid % num_value_heads).to(tl.int64)
    head = value_head // (num_value_heads // num_heads)
    pid = pid // num_value_heads
    first_v = pid % tl.cdiv(HEAD_V, BLOCK_V) * BLOCK_V
    number = pid // tl.cdiv(HEAD_V, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    mask_kv = (offs_k < HEAD_K)[:, None] & (offs_v < HEAD_V)[None, :]
    STATE_ALIGNED: tl.constexpr = HEAD_V % 8 == 0

    if VARLEN and HAS_INITIAL:
        # An empty document is in no segment: its gradient passes through.
        from_here = tl.load(cu_seqlens_ptr + number, mask=number < num_seqs, other=0)
        to_here = tl.load(cu_seqlens_ptr + number + 1, mask=number < num_seqs, other=1)
        if from_here == to_here:
            empty = (number.to(tl.int64) * num_value_heads + value_head) * HEAD_K * HEAD_V
            passing = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
            if HAS_FINAL:
                passing_ptrs = tile_pointers(dfinal_ptr + empty, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED)
                passing = tl.load(passing_ptrs, mask=mask_kv, other=0.0)
            empty_ptrs = tile_pointers(dinitial_ptr + empty, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED)
            tl.store(empty_ptrs, passing, mask=mask_kv)

    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, segment, VARLEN)
    start = begin + index * segment
    if start >= end:
        return
    row = seq.to(tl.int64) if not VARLEN else tl.zeros([], dtype=tl.int64)
    state = seq.to(tl.int64) * num_value_heads + value_head
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
    dv_ptr += (token * num_value_heads + value_head) * HEAD_V

    gradient = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if HAS_FINAL:
        final_ptrs = tile_pointers(dfinal_ptr + state * HEAD_K * HEAD_V, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED)
        gradient += tl.load(final_ptrs, mask=mask_kv, other=0.0)
    last = tl.cdiv(end - begin, segment) - 1
    for step in range(last - index):
        later = ((number + last - index - step).to(tl.int64) * num_value_heads + value_head) * HEAD_K
        offset_ptrs = tile_pointers(offsets_ptr + later * HEAD_V, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED)
        offset = tl.load(offset_ptrs, mask=mask_kv, other=0.0).to(tl.float32)
        map_row = maps_ptr + later * HEAD_K
        gradient = apply_map(gradient, map_row, offset, offs_k, offs_k < HEAD_K, HEAD_K, BLOCK_K, BLOCK_V)

    first_chunk = spans_before(cu_seqlens_ptr, seqlen, seq, CHUNK, VARLEN) + index * (segment // CHUNK)
    length = tl.minimum(segment, end - start)
    num_chunks = tl.cdiv(length, CHUNK)
    last_chunk = (first_chunk + num_chunks - 1).to(tl.int64)
    gradients_ptr += (last_chunk * num_value_heads + value_head) * HEAD_K * HEAD_V
    for step in range(num_chunks):
        kept_ptrs = tile_pointers(gradients_ptr, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED)
        tl.store(kept_ptrs, gradient.to(gradients_ptr.dtype.element_ty), mask=mask_kv)
        gradients_ptr -= num_value_heads.to(tl.int64) * HEAD_K * HEAD_V

        tokens = (num_chunks - 1 - step) * CHUNK + tl.arange(0, CHUNK)
        mask_t = tokens < length
        offs_t = tokens.to(tl.int64)
        g = load_rated_gate(g_ptr, offs_t, stride_g_token, mask_t, rate, bias, HAS_GATE)
        beta = load_beta(beta_ptr, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
        gradient, dv = gradient_step(
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
            mask_t,
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
        dv_ptrs = tile_pointers(dv_ptr, offs_t, num_value_heads * HEAD_V, offs_v, 1, STATE_ALIGNED)
        tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=mask_t[:, None] & (offs_v < HEAD_V)[None, :])

    if HAS_INITIAL:  # noqa: SIM102 - the one is known when compiling, the other is not
        if index == 0:
            initial_ptrs = tile_pointers(
                dinitial_ptr + state * HEAD_K * HEAD_V, offs_k, HEAD_V, offs_v, 1, STATE_ALIGNED
            )
            tl.store(initial_ptrs, gradient, mask=mask_kv)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What every kernel of the backward reads; absent tensors are None.

    Attributes:
        q: [B, T, H, K].
        k: like q.
        v: [B, T, HV, V] in q's dtype.
        do: the outputs' gradient, like v.
        g: [B, T, HV], log gates, or with A_log what they are made of.
        beta: [B, T, HV], or with beta_sigmoid what it is made of.
        inverse: [B, HV, T, chunk] in q's dtype.
        q_rstd: [B, T, H] fp32, the factors of the l2 norm.
        k_rstd: like q_rstd.
        A_log: [HV].
        dt_bias: [HV].
        cu_seqlens: [documents + 1] int32.
        scale: of the outputs.
        beta_sigmoid: whether beta is a sigmoid.
        neg_eigval: whether it is twice that.
        spans: of the sequences.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    inverse: torch.Tensor
    q_rstd: torch.Tensor | None
    k_rstd: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    scale: float
    beta_sigmoid: bool
    neg_eigval: bool
    spans: Spans

    def arguments(self) -> tuple[Any, ...]:
        """The tensors, in the kernels' order, v left out; where one is absent another stands for it."""
        absent = self.g
        optional = (self.q_rstd, self.k_rstd, self.A_log, self.dt_bias, self.cu_seqlens)
        tensors = (self.q, self.k, self.do, self.g, self.beta, self.inverse)
        return (*tensors, *[absent if each is None else each for each in optional])

    def sizes(self) -> tuple[Any, ...]:
        """The numbers, from `scale` to `segment`, and all strides of q, k, do, g and beta, in the kernels' order."""
        sizes = (self.q.shape[1], self.spans.num_seqs, self.q.shape[2], self.v.shape[2], self.spans.segment)
        strides = [each.stride() for each in (self.q, self.k, self.do, self.g, self.beta)]
        return (self.scale, *sizes, *itertools.chain.from_iterable(strides))

    def flags(self) -> dict[str, Any]:
        """The constexpr arguments that all kernels have."""
        return {
            "CHUNK": self.spans.chunk,
            "HEAD_K": self.q.shape[3],
            "HEAD_V": self.v.shape[3],
            "BLOCK_K": max(16, triton.next_power_of_2(self.q.shape[3])),
            "L2NORM": self.q_rstd is not None,
            "HAS_GATE": self.A_log is not None,
            "HAS_GATE_BIAS": self.dt_bias is not None,
            "BETA_SIGMOID": self.beta_sigmoid,
            "NEG_EIGVAL": self.neg_eigval,
            "VARLEN": self.cu_seqlens is not None,
            "ALIGNED": tensors_aligned(self.q, self.k, self.v, self.do),
        }

    def state_like(self, count: int, *, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """New memory for [count, HV, K, columns]."""
        shape = (count, self.v.shape[2], self.q.shape[3], columns)
        return torch.empty(shape, dtype=dtype, device=self.q.device)


def gradient_scan(
    inputs: Inputs,
    *,
    maps: tuple[torch.Tensor, torch.Tensor] | None,
    dfinal: torch.Tensor | None,
    need_initial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launches the kernel.

    Args:
        inputs: what is read.
        maps: the matrices and offsets of `gradient_maps`, if sequences are split.
        dfinal: the final states' gradient, fp32 and contiguous; zero if None.
        need_initial: whether the initial states' gradient is wanted.

    Returns:
        dv [B, T, HV, V] in q's dtype, the gradients of the states that leave the chunks [num_chunks, HV, K, V] in q's
        dtype, and those of the initial states [sequences, HV, K, V] in fp32 or None.
    """
    num_value_heads, head_v = inputs.v.shape[2:]
    spans, dtype = inputs.spans, inputs.q.dtype
    dv = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.q.device)
    gradients = inputs.state_like(spans.num_chunks, columns=head_v, dtype=dtype)
    dinitial = None
    if need_initial:
        dinitial = inputs.state_like(spans.num_seqs, columns=head_v, dtype=torch.float32)
    matrices, offsets = (inputs.g, inputs.g) if maps is None else maps

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (spans.num_segments * triton.cdiv(head_v, meta["BLOCK_V"]) * num_value_heads,)

    gradient_scan_kernel[grid](
        *inputs.arguments(),
        matrices,
        offsets,
        inputs.g if dfinal is None else dfinal,
        dv,
        gradients,
        gradients if dinitial is None else dinitial,
        *inputs.sizes(),
        **inputs.flags(),
        HAS_FINAL=dfinal is not None,
        HAS_INITIAL=need_initial,
    )
    return dv, gradients, dinitial
