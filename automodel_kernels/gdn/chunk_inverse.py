"""The triangular system of every chunk, inverted; and the norms of queries and keys.

For a chunk of one value head, with E_ts = exp(sum of g over s < j <= t), for s < t:

    M_ts = beta_t E_ts (k_t . k_s)        inverse = (I + M)^-1        d = inverse beta (v - exp(G) k S)

    q, k [batch, seqlen, heads, K]   g, beta [batch, seqlen, value heads]   inverse [batch, value heads, seqlen, CHUNK]
    q_rstd, k_rstd [batch, seqlen, heads] fp32: with L2NORM, rsqrt(sum over K of x^2 + 1e-6)

Row t of `inverse` holds the columns of its token's chunk, in q's dtype. A program has one chunk of one query head: the
products k k^T are formed once for all value heads that share it. The inverse is exact to fp32 rounding, equal keys and
beta 2 included, where powers of M would grow without bounds: blocks on the diagonal are merged in pairs,

    (I + [[A, 0], [B, C]])^-1 = [[A', 0], [-C' B A', C']]

with fp32 products, from single tokens to the whole chunk. A batch dimension holds all blocks of one size. Up to 16
tokens, the least that a product may have, the two products are those of whole blocks of 16 with B alone in the middle.

Bytes a token and query head, 2-byte types: 4 K + group (2 CHUNK + 8). FLOPs: 2 K CHUNK + about 50 CHUNK group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.tiles import (
    L2NORM_EPS,
    find_span,
    gate_sums,
    load_beta,
    load_gate,
    load_tile,
    pair_decay,
    tile_pointers,
)
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from automodel_kernels.gdn.tiles import Spans

__all__ = ["chunk_inverse", "chunk_inverse_kernel", "invert_unit_lower"]


@triton.jit
def invert_16(M):
    """(I + M)^-1 of blocks [N, 16, 16] with M strictly lower triangular: of 2 rows, of 4, of 8, of 16."""
    rows = tl.arange(0, 16)[None, :, None]
    cols = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(rows == cols, 1.0, tl.where(rows // 2 == cols // 2, -M, 0.0))
    for level in tl.static_range(1, 4):
        # What lies below the diagonal in blocks of twice the size that is done.
        below = tl.where((rows >> level != cols >> level) & (rows >> level + 1 == cols >> level + 1), M, 0.0)
        inverse -= tl.dot(tl.dot(inverse, below, input_precision="ieee"), inverse, input_precision="ieee")
    return inverse


@triton.jit
def cut(M, N: tl.constexpr, SIZE: tl.constexpr):
    """Blocks [N, 2 SIZE, 2 SIZE] as their upper left, lower left and lower right quarters [N, SIZE, SIZE]."""
    parts = tl.permute(tl.reshape(M, (N, 2, SIZE, 2, SIZE)), (0, 2, 4, 3, 1))
    upper, lower = tl.split(parts)
    upper_left, _ = tl.split(upper)
    lower_left, lower_right = tl.split(lower)
    return upper_left, lower_left, lower_right


@triton.jit
def merge(M, N: tl.constexpr, SIZE: tl.constexpr):
    """(I + M)^-1 of blocks [N, 2 SIZE, 2 SIZE] from those of their quarters on the diagonal."""
    first, below, second = cut(M, N, SIZE)
    both = tl.reshape(tl.permute(tl.join(first, second), (0, 3, 1, 2)), (2 * N, SIZE, SIZE))
    both = invert_16(both) if SIZE == 16 else merge(both, 2 * N, SIZE // 2)
    both = tl.permute(tl.reshape(both, (N, 2, SIZE, SIZE)), (0, 2, 3, 1))
    first, second = tl.split(both)
    below = -tl.dot(tl.dot(second, below, input_precision="ieee"), first, input_precision="ieee")
    halves = tl.join(tl.join(first, tl.zeros_like(first)), tl.join(below, second))
    return tl.reshape(tl.permute(halves, (0, 4, 1, 3, 2)), (N, 2 * SIZE, 2 * SIZE))


@triton.jit
def invert_unit_lower(M, SIZE: tl.constexpr):
    """(I + M)^-1 of a strictly lower triangular M [SIZE, SIZE] in fp32; SIZE is 16, 32 or 64."""
    blocks = tl.reshape(M, (1, SIZE, SIZE))
    blocks = invert_16(blocks) if SIZE == 16 else merge(blocks, 1, SIZE // 2)
    return tl.reshape(blocks, (SIZE, SIZE))


@tuned(
    space=spaces.GDN_CHUNK_INVERSE,
    key=("q_ptr", "HEAD_K", "CHUNK", "ALIGNED"),
    outputs=("inverse_ptr", "q_rstd_ptr", "k_rstd_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "q_ptr",
        "k_ptr",
        "g_ptr",
        "beta_ptr",
        "A_log_ptr",
        "dt_bias_ptr",
        "cu_seqlens_ptr",
        "inverse_ptr",
        "q_rstd_ptr",
        "k_rstd_ptr",
        "num_seqs",
        "seqlen",
        "num_heads",
        "group",
        "stride_q_batch",
        "stride_q_token",
        "stride_q_head",
        "stride_q_dim",
        "stride_k_batch",
        "stride_k_token",
        "stride_k_head",
        "stride_k_dim",
        "stride_g_batch",
        "stride_g_token",
        "stride_g_head",
        "stride_beta_batch",
        "stride_beta_token",
        "stride_beta_head",
    ]
)
def chunk_inverse_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    inverse_ptr,
    q_rstd_ptr,
    k_rstd_ptr,
    num_seqs: tl.int32,
    seqlen: tl.int32,
    num_heads: tl.int32,
    group: tl.int32,
    stride_q_batch: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_q_dim: tl.int64,
    stride_k_batch: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_k_dim: tl.int64,
    stride_g_batch: tl.int64,
    stride_g_token: tl.int64,
    stride_g_head: tl.int64,
    stride_beta_batch: tl.int64,
    stride_beta_token: tl.int64,
    stride_beta_head: tl.int64,
    HEAD_K: tl.constexpr,
    CHUNK: tl.constexpr,
    L2NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A chunk of one query head and all its value heads; see the module."""
    pid = tl.program_id(0)
    head = pid % num_heads
    seq, chunk, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, pid // num_heads, CHUNK, VARLEN)
    start = begin + chunk * CHUNK
    if start < end:
        # The row of the batch.
        row = (seq * 0 if VARLEN else seq).to(tl.int64)
        offs_c = tl.arange(0, CHUNK)
        offs_t = (start + offs_c).to(tl.int64)
        mask_t = offs_t < end
        head_64 = head.to(tl.int64)
        q_ptr += row * stride_q_batch + head_64 * stride_q_head
        k_ptr += row * stride_k_batch + head_64 * stride_k_head

        products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        k_squares = tl.zeros([CHUNK], dtype=tl.float32)
        q_squares = tl.zeros([CHUNK], dtype=tl.float32)
        for first in range(0, HEAD_K, BLOCK_K):
            k = load_tile(k_ptr, offs_t, stride_k_token, mask_t, first, stride_k_dim, HEAD_K, BLOCK_K, ALIGNED)
            products = tl.dot(k, tl.trans(k), products, input_precision="ieee")
            if L2NORM:
                wide = k.to(tl.float32)
                k_squares += tl.sum(wide * wide, axis=1)
                q = load_tile(q_ptr, offs_t, stride_q_token, mask_t, first, stride_q_dim, HEAD_K, BLOCK_K, ALIGNED)
                wide = q.to(tl.float32)
                q_squares += tl.sum(wide * wide, axis=1)
        if L2NORM:
            k_rstd = tl.rsqrt(k_squares + L2NORM_EPS)
            products *= k_rstd[:, None] * k_rstd[None, :]
            offs_rstd = (row * seqlen + offs_t) * num_heads + head
            tl.store(k_rstd_ptr + offs_rstd, k_rstd, mask=mask_t)
            tl.store(q_rstd_ptr + offs_rstd, tl.rsqrt(q_squares + L2NORM_EPS), mask=mask_t)

        strictly_lower = offs_c[:, None] > offs_c[None, :]
        for member in range(group):
            value_head = head_64 * group + member
            g_row = g_ptr + row * stride_g_batch + value_head * stride_g_head
            g = load_gate(
                g_row, offs_t, stride_g_token, mask_t, A_log_ptr, dt_bias_ptr, value_head, HAS_GATE, HAS_GATE_BIAS
            )
            beta_row = beta_ptr + row * stride_beta_batch + value_head * stride_beta_head
            beta = load_beta(beta_row, offs_t, stride_beta_token, mask_t, BETA_SIGMOID, NEG_EIGVAL)
            high, low = gate_sums(g)
            decay = pair_decay(high[:, None], low[:, None], high[None, :], low[None, :], strictly_lower)
            inverse = invert_unit_lower(products * decay * beta[:, None], CHUNK)
            inverse_row = inverse_ptr + (row * num_heads * group + value_head) * seqlen * CHUNK
            ptrs = tile_pointers(inverse_row, offs_t, CHUNK, offs_c, 1, True)
            tl.store(ptrs, inverse.to(inverse_ptr.dtype.element_ty), mask=mask_t[:, None])


def chunk_inverse(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    l2norm: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    spans: Spans,
    aligned: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launches the kernel.

    Returns:
        inverse [batch, value heads, seqlen, chunk] in q's dtype, and with `l2norm` q_rstd and k_rstd [batch, seqlen,
        heads] fp32.
    """
    batch, seqlen, heads, head_k = q.shape
    value_heads = g.shape[2]
    inverse = q.new_empty(batch, value_heads, seqlen, spans.chunk)
    q_rstd, k_rstd = (q.new_empty(batch, seqlen, heads, dtype=torch.float32) if l2norm else None for _ in range(2))
    chunk_inverse_kernel[(spans.num_chunks * heads,)](
        q,
        k,
        g,
        beta,
        g if A_log is None else A_log,
        g if dt_bias is None else dt_bias,
        q if cu_seqlens is None else cu_seqlens,
        inverse,
        inverse if q_rstd is None else q_rstd,
        inverse if k_rstd is None else k_rstd,
        spans.num_seqs,
        seqlen,
        heads,
        value_heads // heads,
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *beta.stride(),
        HEAD_K=head_k,
        CHUNK=spans.chunk,
        L2NORM=l2norm,
        HAS_GATE=A_log is not None,
        HAS_GATE_BIAS=dt_bias is not None,
        BETA_SIGMOID=beta_sigmoid,
        NEG_EIGVAL=neg_eigval,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
    )
    return inverse, q_rstd, k_rstd
