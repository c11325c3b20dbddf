"""What a program of `chunk_backward` does for one value head: the pass for dq, and that for dk, the gate and beta.

Formulas and names are those of `chunk_backward`. With y = rstd x a normalised query or key, what is summed is rstd
times the gradient of y, which for queries lacks the factor scale q_rstd; without the norm, rstd is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from automodel_kernels.gdn.scan import LARGEST_FLOAT16
from automodel_kernels.gdn.tiles import gate_parts, load_tile, pair_decay, tile_pointers

__all__ = [
    "key_pass",
    "load_state",
    "narrow",
    "pair_decay_of",
    "pair_sums",
    "query_pass",
    "store_gate_gradient",
    "store_gradient",
]


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x in the dtype, at most its largest value: infinity times a key of zeros, whose norm's factor is 1000, is NaN."""
    if dtype == tl.float16:
        x = tl.minimum(x, LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def load_state(
    state_ptr, first_v, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Some columns of a kept [HEAD_K, HEAD_V], zero outside; without masks where they would mask nothing."""
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    ptrs = tile_pointers(state_ptr, offs_k, HEAD_V, offs_v, 1, HEAD_V % 8 == 0)
    if HEAD_K == BLOCK_K and HEAD_V % BLOCK_V == 0:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(offs_k < HEAD_K)[:, None] & (offs_v < HEAD_V)[None, :], other=0.0)
    return tile


@triton.jit
def store_gradient(
    dx_ptr,
    x_ptr,
    dx,
    rstd,
    offs_t,
    mask_t,
    stride_x_token,
    stride_x_dim,
    num_heads,
    HEAD_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Takes rstd times the gradient of normalised queries or keys [CHUNK, BLOCK_K] through the norm, and writes it."""
    if L2NORM:
        # Read again: kept through the kernel, the tile costs more.
        x = load_tile(x_ptr, offs_t, stride_x_token, mask_t, 0, stride_x_dim, HEAD_K, BLOCK_K, ALIGNED)
        wide = x.to(tl.float32)
        dx -= wide * (tl.sum(wide * dx, axis=1) * rstd * rstd)[:, None]
    offs_k = tl.arange(0, BLOCK_K)
    ptrs = tile_pointers(dx_ptr, offs_t, num_heads * HEAD_K, offs_k, 1, HEAD_K % 8 == 0)
    tl.store(ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask_t[:, None] & (offs_k < HEAD_K)[None, :])


@triton.jit
def store_gate_gradient(
    dg_ptr,
    dA_log_ptr,
    ddt_bias_ptr,
    dg,
    g_ptr,
    g,
    offs_t,
    mask_t,
    stride_g_token,
    A_log_ptr,
    dt_bias_ptr,
    num_value_heads,
    value_head,
    part,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
):
    """Writes the gradient of the gate's argument; with HAS_GATE also the chunk's part of what A_log and dt_bias get."""
    if HAS_GATE:
        # g is in (-inf, 0], and a gate that decays all away has no gradient.
        d_log = tl.where(dg == 0.0, 0.0, dg * g)
        raw = tl.load(g_ptr + offs_t * stride_g_token, mask=mask_t, other=0.0).to(tl.float32)
        if HAS_GATE_BIAS:
            raw += tl.load(dt_bias_ptr + value_head).to(tl.float32)
        rate = tl.exp(tl.load(A_log_ptr + value_head).to(tl.float32))
        dg = tl.where(mask_t, -dg * rate / (1.0 + tl.exp(-raw)), 0.0)
        tl.store(dA_log_ptr + part * num_value_heads + value_head, tl.sum(d_log, axis=0))
        if HAS_GATE_BIAS:
            tl.store(ddt_bias_ptr + part * num_value_heads + value_head, tl.sum(dg, axis=0))
    tl.store(dg_ptr + offs_t * num_value_heads, dg.to(dg_ptr.dtype.element_ty), mask=mask_t)


@triton.jit
def pair_decay_of(high, low, rstd, zero, STRICT: tl.constexpr, CHUNK: tl.constexpr):
    """E_ts times rstd_s for s <= t, or with STRICT for s < t, [CHUNK, CHUNK].

    `zero` is 0 without the compiler's knowing: it then forms the matrix where it is wanted, and keeps no part of it in
    registers between two uses.
    """
    offs = tl.arange(0, CHUNK) + zero
    mask = offs[:, None] > offs[None, :] if STRICT else offs[:, None] >= offs[None, :]
    high += zero
    return pair_decay(high[:, None], low[:, None], high[None, :], low[None, :], mask) * (rstd + zero)[None, :]


@triton.jit
def pair_sums(weights, DIRECT: tl.constexpr, CHUNK: tl.constexpr):
    """Two vectors x, y [CHUNK] for which x_j + sum_{t >= j} y_t is the sum of the weights of all pairs s < j <= t.

    Weights on and above the diagonal count only where they cancel. In fp32 (DIRECT) each sum is formed by itself, for
    16-bit inputs as a difference of sums over rows and columns, whose rounding is far below that of the weights.
    """
    if DIRECT:
        offs = tl.arange(0, CHUNK)
        below = tl.cumsum(weights, axis=0, reverse=True)
        sums = tl.sum(tl.where(offs[:, None] > offs[None, :], below, 0.0), axis=1)
        rest = tl.zeros([CHUNK], dtype=tl.float32)
    else:
        sums = tl.zeros([CHUNK], dtype=tl.float32)
        rest = tl.sum(weights, axis=1) - tl.sum(weights, axis=0)
    return sums, rest


@triton.jit
def query_pass(
    dq,
    dk,
    q,
    k,
    q_rstd,
    k_rstd,
    beta,
    high,
    low,
    v_ptr,
    do_ptr,
    inverse_ptr,
    state_ptr,
    offs_t,
    mask_t,
    scale,
    zero,
    stride_v_token,
    stride_v_dim,
    stride_do_token,
    stride_do_dim,
    CHUNK: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Adds one value head to dq / (scale q_rstd), and to k_rstd dk what it gets through the outputs' pairs.

    Returns both, and two vectors x, y [CHUNK] for which x_j + sum_{t >= j} y_t is what the outputs give to dg_j.
    """
    dtype: tl.constexpr = k.dtype
    since_start = tl.exp(high + low)
    inverse = load_tile(inverse_ptr, offs_t, CHUNK, mask_t, 0, 1, CHUNK, CHUNK, True)
    p = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dsum = tl.zeros([CHUNK], dtype=tl.float32)
    for first_v in range(0, HEAD_V, BLOCK_V):
        v = load_tile(v_ptr, offs_t, stride_v_token, mask_t, first_v, stride_v_dim, HEAD_V, BLOCK_V, ALIGNED)
        do = load_tile(do_ptr, offs_t, stride_do_token, mask_t, first_v, stride_do_dim, HEAD_V, BLOCK_V, ALIGNED)
        entering = load_state(state_ptr, first_v, HEAD_K, HEAD_V, BLOCK_K, BLOCK_V)
        do_scaled = do.to(tl.float32) * since_start[:, None]
        dsum += tl.sum(do_scaled * tl.dot(q, entering, input_precision="ieee"), axis=1)
        dq = tl.dot(do_scaled.to(dtype), tl.trans(entering), dq, input_precision="ieee")
        error = v.to(tl.float32)
        error -= tl.dot(k, entering, input_precision="ieee") * (since_start * k_rstd)[:, None]
        d = tl.dot(inverse, (error * beta[:, None]).to(dtype), input_precision="ieee")
        p = tl.dot(do, tl.trans(d.to(dtype)), p, input_precision="ieee")

    p *= pair_decay_of(high, low, k_rstd, zero, False, CHUNK)
    dq = tl.dot(narrow(p, dtype), k, dq, input_precision="ieee")
    p *= (scale * q_rstd)[:, None]
    dk = tl.dot(tl.trans(narrow(p, dtype)), q, dk, input_precision="ieee")
    products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32) + zero
    p *= tl.dot(q, tl.trans(k), products, input_precision="ieee")
    sums, rest = pair_sums(p, dtype == tl.float32, CHUNK)
    return dq, dk, sums, dsum * (scale * q_rstd) + rest


@triton.jit
def key_pass(
    dk,
    dg,
    dsum,
    q,
    k,
    q_rstd,
    k_rstd,
    g,
    beta,
    high,
    low,
    v_ptr,
    do_ptr,
    inverse_ptr,
    state_ptr,
    gradient_ptr,
    offs_t,
    mask_t,
    scale,
    zero,
    stride_v_token,
    stride_v_dim,
    stride_do_token,
    stride_do_dim,
    CHUNK: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Adds the rest of one value head to k_rstd dk; returns it, dg and dbeta [CHUNK].

    dg and dsum are what `query_pass` returned for the value head.
    """
    dtype: tl.constexpr = k.dtype
    high_parts, low_parts = gate_parts(g)
    total_high, total_low = tl.sum(high_parts, axis=0), tl.sum(low_parts, axis=0)
    since_start = tl.exp(high + low) * k_rstd
    until_end = tl.exp((total_high - high) + (total_low - low)) * k_rstd
    inverse = load_tile(inverse_ptr, offs_t, CHUNK, mask_t, 0, 1, CHUNK, CHUNK, True)
    products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32) + zero
    pairs = tl.dot(q, tl.trans(k), products, input_precision="ieee") * (scale * q_rstd)[:, None]
    pairs = (pairs * pair_decay_of(high, low, k_rstd, zero, False, CHUNK)).to(dtype)

    r = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    to_end = tl.zeros([CHUNK], dtype=tl.float32)
    through = tl.zeros([BLOCK_K], dtype=tl.float32)
    for first_v in range(0, HEAD_V, BLOCK_V):
        v = load_tile(v_ptr, offs_t, stride_v_token, mask_t, first_v, stride_v_dim, HEAD_V, BLOCK_V, ALIGNED)
        do = load_tile(do_ptr, offs_t, stride_do_token, mask_t, first_v, stride_do_dim, HEAD_V, BLOCK_V, ALIGNED)
        entering = load_state(state_ptr, first_v, HEAD_K, HEAD_V, BLOCK_K, BLOCK_V)
        leaving = load_state(gradient_ptr, first_v, HEAD_K, HEAD_V, BLOCK_K, BLOCK_V)
        through += tl.sum(entering.to(tl.float32) * leaving.to(tl.float32), axis=1)
        seen = tl.dot(k, entering, input_precision="ieee") * since_start[:, None]
        error = v.to(tl.float32) - seen
        d = tl.dot(inverse, (error * beta[:, None]).to(dtype), input_precision="ieee")
        d_narrow = tl.trans(d.to(dtype))
        d *= until_end[:, None]
        dk = tl.dot(narrow(d, dtype), tl.trans(leaving), dk, input_precision="ieee")
        dd = tl.dot(k, leaving, input_precision="ieee")
        to_end += tl.sum(d * dd, axis=1)
        dd = tl.dot(tl.trans(pairs), do, dd * until_end[:, None], input_precision="ieee")
        e = tl.dot(tl.trans(inverse), dd.to(dtype), input_precision="ieee")
        r = tl.dot(e.to(dtype), d_narrow, r, input_precision="ieee")
        dbeta += tl.sum(e * error, axis=1)
        e *= -beta[:, None]
        dsum += tl.sum(e * seen, axis=1)
        e *= since_start[:, None]
        dk = tl.dot(narrow(e, dtype), tl.trans(entering), dk, input_precision="ieee")

    r *= pair_decay_of(high, low, k_rstd, 2 * zero, True, CHUNK) * -k_rstd[:, None]
    products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32) + zero
    weights = r * tl.dot(k, tl.trans(k), products, input_precision="ieee")
    dbeta += tl.sum(weights, axis=1)
    weights *= beta[:, None]
    sums, rest = pair_sums(weights, dtype == tl.float32, CHUNK)
    dsum += rest
    r *= beta[:, None]
    r += tl.trans(r)
    dk = tl.dot(narrow(r, dtype), k, dk, input_precision="ieee")

    dg += tl.cumsum(dsum, axis=0, reverse=True) + tl.sum(through, axis=0) * tl.exp(total_high + total_low)
    dg += sums + (tl.cumsum(to_end, axis=0) - to_end)
    return dk, dg, dbeta
