"""The gradients of q, k, the gates and beta, chunk by chunk, with everything that the chunk needs formed again on chip.

Per value head, with S the state that enters the chunk, G the gradient of the one that leaves it, d and e as in `scan`
and `gradient_scan`, c_t the sum of log gates, Q the chunk's last token, and dM_ts = -(e_t . d_s) for s < t:

    dq_t = scale [exp(c_t) S do_t + sum_{s <= t} E_ts (do_t . d_s) k_s]
    dk_s = scale sum_{t >= s} E_ts (do_t . d_s) q_t + exp(c_Q - c_s) G d_s - beta_s exp(c_s) S e_s
           + sum_t [dM_st beta_s E_st + dM_ts beta_t E_ts] k_t
    dbeta_t = e_t . (v_t - exp(c_t) S^T k_t) + sum_s dM_ts E_ts (k_t . k_s)
    dg_j = sum_{s < j <= t} W_ts + sum_{t >= j} exp(c_t) [scale do_t . (S^T q_t) - beta_t e_t . (S^T k_t)]
           + sum_{s < j} exp(c_Q - c_s) d_s . (G^T k_s) + exp(c_Q) <G, S>
    W_ts = scale E_ts (q_t . k_s) (do_t . d_s) + dM_ts beta_t E_ts (k_t . k_s)

dg is thus a sum of what each decay factor receives, and not the difference of large sums that q . dq - v . dv is: under
decay that loses most digits. Everything in it is fp32 but for the operands of products.

A program has one chunk and one query head. It walks twice through the value heads of the group and blocks of V: first
for dq and what dk has in common with it, then for the rest of dk, the gates and beta. d is formed in both, for a tenth
of the products; at once, the sums of dq, dk and both kinds of pairs do not fit the registers of an H100. dq and dk of
all value heads are added in fp32, taken through the l2 norm (dx = rstd (dy - y (y . dy)), y = rstd x), and written
once. With HAS_GATE dg is taken on to the raw gate, and each chunk writes its part of what A_log and dt_bias get.

Bytes a token (2 an element): q, k, dq, dk: 8 K H; v, do: 4 V HV; inverse: 2 CHUNK HV; S and G: 4 K V HV / CHUNK. FLOPs
a token and value head: 2 (7 K V + 6 CHUNK V + 6 CHUNK K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.chunk_passes import key_pass, query_pass, store_gate_gradient, store_gradient
from automodel_kernels.gdn.gradient_scan import UNSPECIALIZED_STEP
from automodel_kernels.gdn.tiles import (
    find_span,
    gate_sums,
    load_beta,
    load_gate,
    load_tile,
)
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from automodel_kernels.gdn.gradient_scan import Inputs

__all__ = ["ChunkGradients", "chunk_backward", "chunk_backward_kernel"]

UNSPECIALIZED = [
    *UNSPECIALIZED_STEP,
    "v_ptr",
    "states_ptr",
    "gradients_ptr",
    "dq_ptr",
    "dk_ptr",
    "dg_ptr",
    "dbeta_ptr",
    "dA_log_ptr",
    "ddt_bias_ptr",
    "stride_v_batch",
    "stride_v_token",
    "stride_v_head",
    "stride_v_dim",
]


@tuned(
    space=spaces.GDN_CHUNK_BACKWARD,
    key=("q_ptr", "HEAD_K", "HEAD_V", "BLOCK_K", "CHUNK", "VARLEN", "ALIGNED"),
    outputs=("dq_ptr", "dk_ptr", "dg_ptr", "dbeta_ptr", "dA_log_ptr", "ddt_bias_ptr"),
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_backward_kernel(
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
    v_ptr,
    states_ptr,
    gradients_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    dA_log_ptr,
    ddt_bias_ptr,
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
    stride_v_batch: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_v_dim: tl.int64,
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
    BLOCK_GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A chunk and query head, with all its value heads; see the module."""
    # Heads fastest: neighbours share rows of every tensor.
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    number = pid // num_heads
    group = num_value_heads // num_heads
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, CHUNK, VARLEN)
    start = begin + index * CHUNK
    if start >= end:
        return
    row = seq.to(tl.int64) if not VARLEN else tl.zeros([], dtype=tl.int64)
    offs_t = start + tl.arange(0, CHUNK).to(tl.int64)
    mask_t = offs_t < end
    first_head = head * group
    q_ptr += row * stride_q_batch + head * stride_q_head
    k_ptr += row * stride_k_batch + head * stride_k_head
    v_ptr += row * stride_v_batch + first_head * stride_v_head
    do_ptr += row * stride_do_batch + first_head * stride_do_head
    g_ptr += row * stride_g_batch + first_head * stride_g_head
    beta_ptr += row * stride_beta_batch + first_head * stride_beta_head
    inverse_ptr += (row * num_value_heads + first_head) * seqlen * CHUNK
    first_state = (number.to(tl.int64) * num_value_heads + first_head) * HEAD_K * HEAD_V
    offs_h = row * seqlen * num_value_heads + first_head
    q = load_tile(q_ptr, offs_t, stride_q_token, mask_t, 0, stride_q_dim, HEAD_K, BLOCK_K, ALIGNED)
    k = load_tile(k_ptr, offs_t, stride_k_token, mask_t, 0, stride_k_dim, HEAD_K, BLOCK_K, ALIGNED)
    if L2NORM:
        offs_r = (row * seqlen + offs_t) * num_heads + head
        q_rstd = tl.load(q_rstd_ptr + offs_r, mask=mask_t, other=0.0)
        k_rstd = tl.load(k_rstd_ptr + offs_r, mask=mask_t, other=0.0)
    else:
        q_rstd = tl.where(mask_t, 1.0, 0.0)
        k_rstd = q_rstd
    # Zero, but the compiler does not know: a length is not negative.
    zero = seqlen >> 31
    dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    offs_m = tl.arange(0, BLOCK_GROUP)
    dgs = tl.zeros([CHUNK, BLOCK_GROUP], dtype=tl.float32)
    dsums = dgs

    for member in range(group):
        g_here = g_ptr + member * stride_g_head
        g = load_gate(
            g_here, offs_t, stride_g_token, mask_t, A_log_ptr, dt_bias_ptr, first_head + member, HAS_GATE, HAS_GATE_BIAS
        )
        beta_here = beta_ptr + member * stride_beta_head
        beta = load_beta(beta_here, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
        high, low = gate_sums(g)
        dq, dk, dg, dsum = query_pass(
            dq, dk, q, k, q_rstd, k_rstd, beta, high, low,
            v_ptr + member * stride_v_head,
            do_ptr + member * stride_do_head,
            inverse_ptr + member * (seqlen.to(tl.int64) * CHUNK),
            states_ptr + first_state + member * (HEAD_K * HEAD_V),
            offs_t, mask_t, scale, zero * member, stride_v_token, stride_v_dim, stride_do_token, stride_do_dim,
            CHUNK, HEAD_K, HEAD_V, BLOCK_K, BLOCK_V, ALIGNED,
        )  # fmt: skip
        dgs = tl.where((offs_m == member)[None, :], dg[:, None], dgs)
        dsums = tl.where((offs_m == member)[None, :], dsum[:, None], dsums)
    store_gradient(
        dq_ptr + (row * seqlen * num_heads + head) * HEAD_K, q_ptr, dq * (scale * q_rstd)[:, None], q_rstd,
        offs_t, mask_t, stride_q_token, stride_q_dim, num_heads, HEAD_K, BLOCK_K, L2NORM, ALIGNED,
    )  # fmt: skip

    for member in range(group):
        g_here = g_ptr + member * stride_g_head
        g = load_gate(
            g_here, offs_t, stride_g_token, mask_t, A_log_ptr, dt_bias_ptr, first_head + member, HAS_GATE, HAS_GATE_BIAS
        )
        beta_here = beta_ptr + member * stride_beta_head
        beta = load_beta(beta_here, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
        high, low = gate_sums(g)
        dk, dg, dbeta = key_pass(
            dk,
            tl.sum(tl.where((offs_m == member)[None, :], dgs, 0.0), axis=1),
            tl.sum(tl.where((offs_m == member)[None, :], dsums, 0.0), axis=1),
            q, k, q_rstd, k_rstd, g, beta, high, low,
            v_ptr + member * stride_v_head,
            do_ptr + member * stride_do_head,
            inverse_ptr + member * (seqlen.to(tl.int64) * CHUNK),
            states_ptr + first_state + member * (HEAD_K * HEAD_V),
            gradients_ptr + first_state + member * (HEAD_K * HEAD_V),
            offs_t, mask_t, scale, zero * (member + 1), stride_v_token, stride_v_dim, stride_do_token, stride_do_dim,
            CHUNK, HEAD_K, HEAD_V, BLOCK_K, BLOCK_V, ALIGNED,
        )  # fmt: skip
        store_gate_gradient(
            dg_ptr + offs_h + member, dA_log_ptr, ddt_bias_ptr, dg, g_here, g, offs_t, mask_t, stride_g_token,
            A_log_ptr, dt_bias_ptr, num_value_heads, first_head + member, number.to(tl.int64), HAS_GATE, HAS_GATE_BIAS,
        )  # fmt: skip
        if BETA_SIGMOID:
            dbeta *= beta * (1.0 - beta / 2.0) if NEG_EIGVAL else beta * (1.0 - beta)
        ptrs = dbeta_ptr + offs_h + member + offs_t * num_value_heads
        tl.store(ptrs, dbeta.to(dbeta_ptr.dtype.element_ty), mask=mask_t)
    store_gradient(
        dk_ptr + (row * seqlen * num_heads + head) * HEAD_K, k_ptr, dk, k_rstd,
        offs_t, mask_t, stride_k_token, stride_k_dim, num_heads, HEAD_K, BLOCK_K, L2NORM, ALIGNED,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """The results of `chunk_backward`.

    Attributes:
        q: like q.
        k: like k.
        g: like g.
        beta: like beta.
        A_log: the chunks' parts [num_chunks, HV] fp32, or None.
        dt_bias: likewise.
    """

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


def chunk_backward(inputs: Inputs, *, states: torch.Tensor, gradients: torch.Tensor) -> ChunkGradients:
    """Launches the kernel.

    Args:
        inputs: what is read, with contiguous A_log and dt_bias.
        states: those that enter the chunks [num_chunks, HV, K, V] in q's dtype.
        gradients: of those that leave them, likewise.
    """
    q, g, spans = inputs.q, inputs.g, inputs.spans
    num_heads, num_value_heads = q.shape[2], inputs.v.shape[2]
    dq, dk, dg, dbeta = (
        torch.empty(each.shape, dtype=each.dtype, device=q.device) for each in (q, inputs.k, g, inputs.beta)
    )
    # With documents there may be programs beyond the last chunk, and they write nothing.
    new = torch.empty if inputs.cu_seqlens is None else torch.zeros
    dA_log, ddt_bias = (
        None if each is None else new((spans.num_chunks, num_value_heads), dtype=torch.float32, device=q.device)
        for each in (inputs.A_log, inputs.dt_bias)
    )
    chunk_backward_kernel[(spans.num_chunks * num_heads,)](
        *inputs.arguments(),
        inputs.v,
        states,
        gradients,
        dq,
        dk,
        dg,
        dbeta,
        dg if dA_log is None else dA_log,
        dg if ddt_bias is None else ddt_bias,
        *inputs.sizes(),
        *inputs.v.stride(),
        **inputs.flags(),
        BLOCK_GROUP=triton.next_power_of_2(num_value_heads // num_heads),
    )
    return ChunkGradients(q=dq, k=dk, g=dg, beta=dbeta, A_log=dA_log, dt_bias=ddt_bias)
