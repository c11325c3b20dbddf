"""The three things that the programs of `chunk_backward` do; its module has the formulas and names.

Groups of arguments come as tuples: a tensor of tokens as (address of the row, strides of token, head and last
dimension), where B and C have their group's address and no head; the row's (dts, decay, runs); the program's place
(chunk's start, tile's first token, chunk's stop, length of a row, first head, last head).
"""

from __future__ import annotations

import triton
import triton.language as tl

from automodel_kernels.spans import tile_pointers
from automodel_kernels.ssd.tiles import BLOCK_TOKENS, BLOCKS_IN_CHUNK, block_totals, total_between

__all__ = ["input_matrix_role", "input_role", "output_matrix_role"]

END_ROWS = tl.constexpr(16)


@triton.jit
def load_tile(tensor, head, offs_m, mask_m, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Tokens offs_m, columns first to first + BLOCK of a head; 0 where masked or beyond WIDTH columns."""
    base_ptr, stride_token, stride_head, stride_col = tensor
    offs_m = offs_m.to(tl.int64)
    offs_n = first + tl.arange(0, BLOCK).to(tl.int64)
    ptrs = tile_pointers(base_ptr + head * stride_head, offs_m, stride_token, offs_n, stride_col, ALIGNED)
    return tl.load(ptrs, mask=mask_m[:, None] & (offs_n < WIDTH)[None, :], other=0.0)


@triton.jit
def load_state(
    states_ptr,
    head,
    first_p,
    first_n,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile [BLOCK_P, BLOCK_N] of a head's state; 0 beyond STATE_DIM."""
    offs_p = first_p + tl.arange(0, BLOCK_P)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    base_ptr = states_ptr + head * HEAD_DIM * STATE_DIM
    ptrs = tile_pointers(base_ptr, offs_p, STATE_DIM, offs_n, 1, STATE_DIM % 8 == 0)
    mask = (offs_p < HEAD_DIM)[:, None] & (offs_n < STATE_DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def masked_exp(exponent, mask):
    """exp where the mask holds, and 0 elsewhere, whatever the exponent is there."""
    return tl.exp(tl.where(mask, exponent, float("-inf")))


@triton.jit
def input_role(
    x,
    dy,
    b_rows,
    c_rows,
    skip,
    tokens,
    place,
    gradients_ptr,
    num_heads,
    results,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    WIDE_STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx of a tile of tokens s, and of each x . u and q."""
    d_ptr, stride_d_head = skip
    dts_ptr, decay_ptr, runs_ptr = tokens
    start, first, stop, seqlen, first_head, last_head = place
    dx_ptr, xu_ptr, q_ptr = results
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    offs_s = first + tl.arange(0, TILE)
    mask_s = offs_s < stop
    leaves = mask_s
    runs_s = offs_s
    if PACKED:
        runs_s = tl.load(runs_ptr + offs_s, mask=mask_s, other=-1)
        leaves = leaves & (runs_s == tl.load(runs_ptr + stop - 1))
    block_s = (first - start) // BLOCK_TOKENS
    if BLOCK_N >= STATE_DIM:
        b = load_tile(b_rows, 0, offs_s, mask_s, 0, STATE_DIM, BLOCK_N, ALIGNED)
    for head in range(first_head, last_head):
        row = head * seqlen
        totals = block_totals(decay_ptr + row, start, stop)
        decay_s = tl.load(decay_ptr + row + offs_s, mask=mask_s, other=0.0)
        dts_s = tl.load(dts_ptr + row + offs_s, mask=mask_s, other=0.0)
        to_end = masked_exp(total_between(totals, block_s, BLOCKS_IN_CHUNK) - decay_s, leaves)
        xu = tl.zeros([TILE], dtype=tl.float32)
        q = tl.zeros([TILE], dtype=tl.float32)
        for first_p in range(0, HEAD_DIM, BLOCK_P):
            u = tl.zeros([TILE, BLOCK_P], dtype=tl.float32)
            for first_n in range(0, WIDE_STATE, BLOCK_N):
                if BLOCK_N < STATE_DIM:
                    b = load_tile(b_rows, 0, offs_s, mask_s, first_n, STATE_DIM, BLOCK_N, ALIGNED)
                g = load_state(gradients_ptr, head, first_p, first_n, HEAD_DIM, STATE_DIM, BLOCK_P, BLOCK_N)
                u = tl.dot(b, tl.trans(g), u, input_precision="ieee")
            u = u * to_end[:, None]
            x_s = load_tile(x, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
            q += tl.sum(u * x_s.to(tl.float32), axis=1)
            for first_t in range(first, stop, BLOCK_K):
                offs_t = first_t + tl.arange(0, BLOCK_K)
                mask_t = offs_t < stop
                pairs = mask_t[None, :] & (offs_t[None, :] >= offs_s[:, None])
                if PACKED:
                    runs_t = tl.load(runs_ptr + offs_t, mask=mask_t, other=-2)
                    pairs = pairs & (runs_t[None, :] == runs_s[:, None])
                cb = tl.zeros([TILE, BLOCK_K], dtype=tl.float32)
                for first_n in range(0, WIDE_STATE, BLOCK_N):
                    if BLOCK_N < STATE_DIM:
                        b = load_tile(b_rows, 0, offs_s, mask_s, first_n, STATE_DIM, BLOCK_N, ALIGNED)
                    c = load_tile(c_rows, 0, offs_t, mask_t, first_n, STATE_DIM, BLOCK_N, ALIGNED)
                    cb = tl.dot(b, tl.trans(c), cb, input_precision="ieee")
                decay_t = tl.load(decay_ptr + row + offs_t, mask=mask_t, other=0.0)
                decay_t += total_between(totals, block_s, (first_t - start) // BLOCK_TOKENS)
                weights = cb * masked_exp(decay_t[None, :] - decay_s[:, None], pairs)
                dy_t = load_tile(dy, head, offs_t, mask_t, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
                u = tl.dot(weights.to(dtype), dy_t, u, input_precision="ieee")
            x_s = load_tile(x, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED).to(tl.float32)
            xu += tl.sum(u * x_s, axis=1)
            dx = u * dts_s[:, None]
            offs_p = first_p + tl.arange(0, BLOCK_P)
            if HAS_D:
                dy_s = load_tile(dy, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED).to(tl.float32)
                if D_PER_CHANNEL:
                    d = tl.load(d_ptr + head * stride_d_head + offs_p)
                    dx += dy_s * d.to(tl.float32)[None, :]
                else:
                    dx += dy_s * tl.load(d_ptr + head * stride_d_head).to(tl.float32)
            # Inside a tile 32 bits do: wider offsets would be kept in registers through the loop.
            tile_ptr = dx_ptr + (first.to(tl.int64) * num_heads + head) * HEAD_DIM
            ptrs = tile_pointers(tile_ptr, tl.arange(0, TILE), num_heads * HEAD_DIM, offs_p, 1, True)
            tl.store(ptrs, dx.to(dtype), mask=mask_s[:, None])
        tl.store(xu_ptr + row + offs_s, xu, mask=mask_s)
        tl.store(q_ptr + row + offs_s, q * dts_s, mask=mask_s)


@triton.jit
def input_matrix_role(
    x,
    dy,
    b_rows,
    c_rows,
    tokens,
    place,
    gradients_ptr,
    stride_sums,
    results,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    WIDE_STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dB of a tile of tokens s over a block of heads, the sums of W over each tile of t and over s, and dD."""
    dts_ptr, decay_ptr, runs_ptr = tokens
    start, first, stop, seqlen, first_head, last_head = place
    partial_b_ptr, stride_partial, row_sums_ptr, col_sums_ptr, partial_d_ptr = results
    dtype: tl.constexpr = gradients_ptr.dtype.element_ty
    offs_s = first + tl.arange(0, TILE)
    mask_s = offs_s < stop
    leaves = mask_s
    runs_s = offs_s
    if PACKED:
        runs_s = tl.load(runs_ptr + offs_s, mask=mask_s, other=-1)
        leaves = leaves & (runs_s == tl.load(runs_ptr + stop - 1))
    block_s = (first - start) // BLOCK_TOKENS
    db = tl.zeros([TILE, WIDE_STATE], dtype=tl.float32)
    for head in range(first_head, last_head):
        row = head * seqlen
        totals = block_totals(decay_ptr + row, start, stop)
        decay_s = tl.load(decay_ptr + row + offs_s, mask=mask_s, other=0.0)
        dts_s = tl.load(dts_ptr + row + offs_s, mask=mask_s, other=0.0)
        scale = dts_s * masked_exp(total_between(totals, block_s, BLOCKS_IN_CHUNK) - decay_s, leaves)
        d_rows = tl.zeros([TILE], dtype=tl.float32)
        for first_p in range(0, HEAD_DIM, BLOCK_P):
            x_s = load_tile(x, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED).to(tl.float32)
            if HAS_D:
                # Here rather than beside dx, where registers are scarcer.
                dy_s = load_tile(dy, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED).to(tl.float32)
                if D_PER_CHANNEL:
                    offs_p = first_p + tl.arange(0, BLOCK_P)
                    tl.store(partial_d_ptr + head * HEAD_DIM + offs_p, tl.sum(dy_s * x_s, axis=0))
                else:
                    d_rows += tl.sum(dy_s * x_s, axis=1)
            g = load_state(gradients_ptr, head, first_p, 0, HEAD_DIM, STATE_DIM, BLOCK_P, WIDE_STATE)
            db = tl.dot((x_s * scale[:, None]).to(dtype), g, db, input_precision="ieee")
        if HAS_D and not D_PER_CHANNEL:
            tl.store(partial_d_ptr + head, tl.sum(d_rows, axis=0))
    for first_t in range(first, stop, TILE):
        offs_t = first_t + tl.arange(0, TILE)
        mask_t = offs_t < stop
        pairs = mask_t[None, :] & (offs_t[None, :] >= offs_s[:, None])
        if PACKED:
            runs_t = tl.load(runs_ptr + offs_t, mask=mask_t, other=-2)
            pairs = pairs & (runs_t[None, :] == runs_s[:, None])
        cb = tl.zeros([TILE, TILE], dtype=tl.float32)
        for first_n in range(0, WIDE_STATE, BLOCK_N):
            b = load_tile(b_rows, 0, offs_s, mask_s, first_n, STATE_DIM, BLOCK_N, ALIGNED)
            c_part = load_tile(c_rows, 0, offs_t, mask_t, first_n, STATE_DIM, BLOCK_N, ALIGNED)
            cb = tl.dot(b, tl.trans(c_part), cb, input_precision="ieee")
        # It only serves the sums of W, which leave out a token's pair with itself.
        cb = tl.where(offs_t[None, :] > offs_s[:, None], cb, 0.0)
        c = load_tile(c_rows, 0, offs_t, mask_t, 0, STATE_DIM, WIDE_STATE, ALIGNED)
        row_slot_ptr = row_sums_ptr + (first - start) // TILE * stride_sums
        col_slot_ptr = col_sums_ptr + (first_t - start) // TILE * stride_sums
        for head in range(first_head, last_head):
            products = tl.zeros([TILE, TILE], dtype=tl.float32)
            for first_p in range(0, HEAD_DIM, BLOCK_P):
                x_s = load_tile(x, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
                dy_t = load_tile(dy, head, offs_t, mask_t, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
                products = tl.dot(x_s, tl.trans(dy_t), products, input_precision="ieee")
            row = head * seqlen
            totals = block_totals(decay_ptr + row, start, stop)
            decay_s = tl.load(decay_ptr + row + offs_s, mask=mask_s, other=0.0)
            dts_s = tl.load(dts_ptr + row + offs_s, mask=mask_s, other=0.0)
            decay_t = tl.load(decay_ptr + row + offs_t, mask=mask_t, other=0.0)
            decay_t += total_between(totals, block_s, (first_t - start) // BLOCK_TOKENS)
            weights = products * masked_exp(decay_t[None, :] - decay_s[:, None], pairs) * dts_s[:, None]
            db = tl.dot(weights.to(dtype), c, db, input_precision="ieee")
            weights = weights * cb
            tl.store(col_slot_ptr + row + offs_s, tl.sum(weights, axis=1), mask=mask_s)
            tl.store(row_slot_ptr + row + offs_t, tl.sum(weights, axis=0), mask=mask_t)
    offs_n = tl.arange(0, WIDE_STATE)
    ptrs = tile_pointers(partial_b_ptr, offs_s.to(tl.int64), stride_partial, offs_n, 1, STATE_DIM % 8 == 0)
    tl.store(ptrs, db, mask=mask_s[:, None] & (offs_n < STATE_DIM)[None, :])


@triton.jit
def output_matrix_role(
    x,
    dy,
    b_rows,
    c_rows,
    tokens,
    place,
    states_ptr,
    gradients_ptr,
    factors_ptr,
    results,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    WIDE_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """dC of a tile of tokens t over a block of heads, and p; of a chunk's first tile the end terms too."""
    dts_ptr, decay_ptr, runs_ptr = tokens
    start, first, stop, seqlen, first_head, last_head = place
    partial_c_ptr, stride_partial, p_ptr, end_terms_ptr = results
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    if first == start:
        # Here, because the first tile has the fewest pairs, and apart from the loops, because it costs registers.
        for head in range(first_head, last_head):
            sums = tl.zeros([END_ROWS], dtype=tl.float32)
            for first_p in range(0, HEAD_DIM, END_ROWS):
                g = load_state(gradients_ptr, head, first_p, 0, HEAD_DIM, STATE_DIM, END_ROWS, WIDE_STATE)
                s = load_state(states_ptr, head, first_p, 0, HEAD_DIM, STATE_DIM, END_ROWS, WIDE_STATE)
                sums += tl.sum(g.to(tl.float32) * s.to(tl.float32), axis=1)
            tl.store(end_terms_ptr + head, tl.sum(sums, axis=0) * tl.load(factors_ptr + head))
    offs_t = first + tl.arange(0, TILE)
    mask_t = offs_t < stop
    enters = mask_t
    runs_t = offs_t
    if PACKED:
        runs_t = tl.load(runs_ptr + offs_t, mask=mask_t, other=-1)
        enters = enters & (runs_t == 0)
    block_t = (first - start) // BLOCK_TOKENS
    c = load_tile(c_rows, 0, offs_t, mask_t, 0, STATE_DIM, WIDE_STATE, ALIGNED)
    dc = tl.zeros([TILE, WIDE_STATE], dtype=tl.float32)
    for head in range(first_head, last_head):
        row = head * seqlen
        totals = block_totals(decay_ptr + row, start, stop)
        decay_t = tl.load(decay_ptr + row + offs_t, mask=mask_t, other=0.0)
        since_start = masked_exp(decay_t + total_between(totals, 0, block_t), enters)
        part = tl.zeros([TILE, WIDE_STATE], dtype=tl.float32)
        for first_p in range(0, HEAD_DIM, BLOCK_P):
            dy_t = load_tile(dy, head, offs_t, mask_t, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
            s = load_state(states_ptr, head, first_p, 0, HEAD_DIM, STATE_DIM, BLOCK_P, WIDE_STATE)
            part = tl.dot(dy_t, s, part, input_precision="ieee")
        part = part * since_start[:, None]
        dc += part
        tl.store(p_ptr + row + offs_t, tl.sum(part * c.to(tl.float32), axis=1), mask=mask_t)
    for first_s in range(start, tl.minimum(first + TILE, stop), BLOCK_K):
        offs_s = first_s + tl.arange(0, BLOCK_K)
        mask_s = offs_s < stop
        pairs = mask_t[:, None] & (offs_t[:, None] >= offs_s[None, :])
        if PACKED:
            runs_s = tl.load(runs_ptr + offs_s, mask=mask_s, other=-2)
            pairs = pairs & (runs_t[:, None] == runs_s[None, :])
        b = load_tile(b_rows, 0, offs_s, mask_s, 0, STATE_DIM, WIDE_STATE, ALIGNED)
        for head in range(first_head, last_head):
            products = tl.zeros([TILE, BLOCK_K], dtype=tl.float32)
            for first_p in range(0, HEAD_DIM, BLOCK_P):
                x_s = load_tile(x, head, offs_s, mask_s, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
                dy_t = load_tile(dy, head, offs_t, mask_t, first_p, HEAD_DIM, BLOCK_P, ALIGNED)
                products = tl.dot(dy_t, tl.trans(x_s), products, input_precision="ieee")
            row = head * seqlen
            totals = block_totals(decay_ptr + row, start, stop)
            decay_t = tl.load(decay_ptr + row + offs_t, mask=mask_t, other=0.0)
            decay_t += total_between(totals, (first_s - start) // BLOCK_TOKENS, block_t)
            decay_s = tl.load(decay_ptr + row + offs_s, mask=mask_s, other=0.0)
            dts_s = tl.load(dts_ptr + row + offs_s, mask=mask_s, other=0.0)
            weights = products * masked_exp(decay_t[:, None] - decay_s[None, :], pairs) * dts_s[None, :]
            dc = tl.dot(weights.to(dtype), b, dc, input_precision="ieee")
    offs_n = tl.arange(0, WIDE_STATE)
    ptrs = tile_pointers(partial_c_ptr, offs_t.to(tl.int64), stride_partial, offs_n, 1, STATE_DIM % 8 == 0)
    tl.store(ptrs, dc, mask=mask_t[:, None] & (offs_n < STATE_DIM)[None, :])
