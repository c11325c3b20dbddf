"""The gradients of x, B and C, and what the gradient of the decay is made of, in one launch over all chunks.

For one head, with the state S that enters a chunk, the gradient G of the state that leaves it, L the decay since the
chunk's start, E_ts = exp(L_t - L_s) for s <= t of one document and 0 for other pairs, and W_ts = E_ts dt_s (C_t . B_s)
(dy_t . x_s):

    u_s  = sum_t E_ts (C_t . B_s) dy_t + exp(L_end - L_s) G B_s            dx_s = dt_s u_s + D dy_s        dD = sum dy x
    dB_s = sum over heads of dt_s [ sum_t E_ts (dy_t . x_s) C_t + exp(L_end - L_s) G^T x_s ]
    dC_t = sum over heads of [ sum_s E_ts dt_s (dy_t . x_s) B_s + exp(L_t) S^T dy_t ]
    for `finish`: x_s . u_s; p_t and q_s, the parts of C_t . dC_t and of dt_s x_s . u_s that come from S and from G;
    sums of W over s < t, by t and tile of s, and by s and tile of t; exp(L_end) <G, S>

A program has one tile of tokens and does dx, or dB, or dC, for a block of heads one after another. The three need the
same tiles but each fills the register file, so they are roles of neighbouring programs, which share tiles in the L2.
The roles of dB and dC take the other tile of a pair first and the heads inside: C . B^T, which only dB's needs, is then
formed once for all of them, and the loop is long enough to load ahead.

x, dy [batch, seqlen, heads, head_dim], B, C [batch, seqlen, groups, state]; S, G [num_chunks, heads, head_dim, state]
in x's dtype. Products take operands in x's dtype and add in fp32; W is a product of two fp32 results and never rounded
to 16 bits, since its sums cancel in `finish`. dB and dC leave as fp32 sums per block of heads.

Bytes a token: heads * (head_dim * (3 + 2 * state / 256) * itemsize + about 36), and 8 * groups * state for each block
of heads. FLOPs a token and head, with the 160 tokens of the average tile's pairs: 6 * head_dim * state
+ 160 * (6 * head_dim + 6 * state).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import find_span
from automodel_kernels.ssd.chunk_roles import input_matrix_role, input_role, output_matrix_role
from automodel_kernels.ssd.tiles import (
    CHUNK,
    CHUNK_TOKENS,
    WANTED_PROGRAMS,
    state_block,
)
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    from automodel_kernels.ssd.tiles import Spans

__all__ = ["ChunkGradients", "chunk_backward_kernel", "launch_chunk_backward", "tile_tokens"]

UNSPECIALIZED = (
    "x_ptr",
    "dy_ptr",
    "b_ptr",
    "c_ptr",
    "d_ptr",
    "dts_ptr",
    "decay_ptr",
    "runs_ptr",
    "cu_seqlens_ptr",
    "states_ptr",
    "gradients_ptr",
    "factors_ptr",
    "dx_ptr",
    "partial_b_ptr",
    "partial_c_ptr",
    "partial_d_ptr",
    "xu_ptr",
    "p_ptr",
    "q_ptr",
    "row_sums_ptr",
    "col_sums_ptr",
    "end_terms_ptr",
    "seqlen",
    "batch",
    "num_seqs",
    "num_heads",
    "num_groups",
    "num_head_blocks",
    "heads_per_block",
    "stride_x_batch",
    "stride_x_token",
    "stride_x_head",
    "stride_x_dim",
    "stride_dy_batch",
    "stride_dy_token",
    "stride_dy_head",
    "stride_dy_dim",
    "stride_b_batch",
    "stride_b_token",
    "stride_b_group",
    "stride_b_state",
    "stride_c_batch",
    "stride_c_token",
    "stride_c_group",
    "stride_c_state",
    "stride_d_head",
)

ROLES = tl.constexpr(3)


@tuned(
    space=spaces.SSD_CHUNK_BACKWARD,
    key=("x_ptr", "HEAD_DIM", "WIDE_STATE", "D_PER_CHANNEL", "ALIGNED", "PACKED", "TILE"),
    outputs=("dx_ptr", "partial_b_ptr", "partial_c_ptr", "xu_ptr", "p_ptr", "q_ptr"),
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_backward_kernel(
    x_ptr,
    dy_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    dts_ptr,
    decay_ptr,
    runs_ptr,
    cu_seqlens_ptr,
    states_ptr,
    gradients_ptr,
    factors_ptr,
    dx_ptr,
    partial_b_ptr,
    partial_c_ptr,
    partial_d_ptr,
    xu_ptr,
    p_ptr,
    q_ptr,
    row_sums_ptr,
    col_sums_ptr,
    end_terms_ptr,
    seqlen: tl.int32,
    batch: tl.int32,
    num_seqs: tl.int32,
    num_heads: tl.int32,
    num_groups: tl.int32,
    num_head_blocks: tl.int32,
    heads_per_block: tl.int32,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_x_dim: tl.int64,
    stride_dy_batch: tl.int64,
    stride_dy_token: tl.int64,
    stride_dy_head: tl.int64,
    stride_dy_dim: tl.int64,
    stride_b_batch: tl.int64,
    stride_b_token: tl.int64,
    stride_b_group: tl.int64,
    stride_b_state: tl.int64,
    stride_c_batch: tl.int64,
    stride_c_token: tl.int64,
    stride_c_group: tl.int64,
    stride_c_state: tl.int64,
    stride_d_head: tl.int64,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    WIDE_STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (chunk, tile, group, block of heads, role), the role fastest; see the module."""
    SLICE_P: tl.constexpr = BLOCK_P if BLOCK_P < HEAD_DIM else HEAD_DIM
    SLICE_N: tl.constexpr = BLOCK_N if BLOCK_N < WIDE_STATE else WIDE_STATE
    pid = tl.program_id(0)
    role = pid % ROLES
    pid = pid // ROLES
    head_block = pid % num_head_blocks
    pid = pid // num_head_blocks
    group = (pid % num_groups).to(tl.int64)
    tile = pid // num_groups
    chunk = tile // (CHUNK_TOKENS // TILE)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, chunk, CHUNK_TOKENS, VARLEN)
    start = begin + index * CHUNK_TOKENS
    stop = tl.minimum(start + CHUNK_TOKENS, end)
    first = start + tile % (CHUNK_TOKENS // TILE) * TILE
    heads_per_group = num_heads // num_groups
    first_head = group * heads_per_group + head_block * heads_per_block
    last_head = tl.minimum(first_head + heads_per_block, (group + 1) * heads_per_group)
    partial_d_ptr += tile.to(tl.int64) * num_heads * (HEAD_DIM if D_PER_CHANNEL else 1)
    if first >= stop:
        if HAS_D & (role == 1):
            offs_d = tl.arange(0, HEAD_DIM if D_PER_CHANNEL else 1)
            for head in range(first_head, last_head):
                tl.store(partial_d_ptr + head * offs_d.shape[0] + offs_d, tl.zeros_like(offs_d).to(tl.float32))
        return

    row = seq.to(tl.int64) * (0 if VARLEN else 1)
    row_heads = row * num_heads * seqlen
    chunk_heads = chunk.to(tl.int64) * num_heads
    # The loops over heads count in 64 bits where these are.
    x = (x_ptr + row * stride_x_batch, stride_x_token, stride_x_head.to(tl.int64), stride_x_dim)
    dy = (dy_ptr + row * stride_dy_batch, stride_dy_token, stride_dy_head.to(tl.int64), stride_dy_dim)
    b = (b_ptr + row * stride_b_batch + group * stride_b_group, stride_b_token, 0, stride_b_state)
    c = (c_ptr + row * stride_c_batch + group * stride_c_group, stride_c_token, 0, stride_c_state)
    tokens = (dts_ptr + row_heads, decay_ptr + row_heads, runs_ptr + row * seqlen)
    place = (start, first, stop, seqlen.to(tl.int64), first_head, last_head)
    gradients_ptr += chunk_heads * HEAD_DIM * STATE_DIM
    # [num_head_blocks, batch, seqlen, groups, state]
    stride_partial = num_groups.to(tl.int64) * STATE_DIM
    partial = (head_block * batch.to(tl.int64) + row) * seqlen * stride_partial + group * STATE_DIM
    if role == 0:
        skip = (d_ptr, stride_d_head.to(tl.int64))
        input_results = (dx_ptr + row_heads * HEAD_DIM, xu_ptr + row_heads, q_ptr + row_heads)
        input_role(
            x,
            dy,
            b,
            c,
            skip,
            tokens,
            place,
            gradients_ptr,
            num_heads,
            input_results,
            HEAD_DIM,
            STATE_DIM,
            WIDE_STATE,
            HAS_D,
            D_PER_CHANNEL,
            PACKED,
            ALIGNED,
            TILE,
            BLOCK_K,
            SLICE_P,
            SLICE_N,
        )
    elif role == 1:
        b_results = (
            partial_b_ptr + partial,
            stride_partial,
            row_sums_ptr + row_heads,
            col_sums_ptr + row_heads,
            partial_d_ptr,
        )
        input_matrix_role(
            x,
            dy,
            b,
            c,
            tokens,
            place,
            gradients_ptr,
            batch.to(tl.int64) * num_heads * seqlen,
            b_results,
            HEAD_DIM,
            STATE_DIM,
            WIDE_STATE,
            HAS_D,
            D_PER_CHANNEL,
            PACKED,
            ALIGNED,
            TILE,
            SLICE_P,
            SLICE_N,
        )
    else:
        c_results = (partial_c_ptr + partial, stride_partial, p_ptr + row_heads, end_terms_ptr + chunk_heads)
        output_matrix_role(
            x,
            dy,
            b,
            c,
            tokens,
            place,
            states_ptr + chunk_heads * HEAD_DIM * STATE_DIM,
            gradients_ptr,
            factors_ptr + chunk_heads,
            c_results,
            HEAD_DIM,
            STATE_DIM,
            WIDE_STATE,
            PACKED,
            ALIGNED,
            TILE,
            BLOCK_K,
            SLICE_P,
        )


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """What `launch_chunk_backward` leaves; all but dx in fp32.

    Attributes:
        dx: [batch, seqlen, heads, head_dim] in x's dtype.
        partial_b: [num_head_blocks, batch, seqlen, groups, state], to be summed over the first.
        partial_c: as partial_b.
        partial_d: [num_tiles, heads, head_dim or 1], to be summed over the first; None without D.
        xu: [batch, heads, seqlen], x . u.
        p: as xu, what of the state that enters the chunk decays up to the token.
        q: as xu, what the token adds to the state that leaves the chunk.
        row_sums: [tiles of a chunk, batch, heads, seqlen]; element k, t is the sum of W_ts over the tokens s of tile k;
            only for tiles up to t's.
        col_sums: as row_sums; element m, s is the sum of W_ts over the tokens t of tile m; only for tiles from s's on.
        end_terms: [num_chunks, heads], exp(L_end) <G, S>.
        tile: tokens of a tile.
    """

    dx: torch.Tensor
    partial_b: torch.Tensor
    partial_c: torch.Tensor
    partial_d: torch.Tensor | None
    xu: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    row_sums: torch.Tensor
    col_sums: torch.Tensor
    end_terms: torch.Tensor
    tile: int


def tile_tokens(dtype: torch.dtype, *, head_dim: int, state_dim: int, aligned: bool) -> int:
    """Tokens of a tile: 64, or 32 where tiles of 64 overflow the registers. The buffers' shapes depend on it."""
    return 64 if aligned and dtype.itemsize == 2 and head_dim <= 64 and state_dim <= 128 else 32


def count_head_blocks(*, num_tiles: int, num_groups: int, heads_per_group: int) -> int:
    """Into how many blocks the heads of a group are cut: two, or more where that does not fill a GPU."""
    blocks = min(2, heads_per_group)
    while blocks < heads_per_group and 3 * num_tiles * num_groups * blocks < WANTED_PROGRAMS:
        blocks = min(2 * blocks, heads_per_group)
    return blocks


def _empty_gradients(
    x: torch.Tensor, B: torch.Tensor, *, D: torch.Tensor | None, blocks: int, tile: int, num_chunks: int
) -> ChunkGradients:
    batch, seqlen, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    tiles = CHUNK // tile

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    return ChunkGradients(
        dx=torch.empty(x.shape, dtype=x.dtype, device=x.device),
        partial_b=floats(blocks, batch, seqlen, num_groups, state_dim),
        partial_c=floats(blocks, batch, seqlen, num_groups, state_dim),
        partial_d=None if D is None else floats(num_chunks * tiles, num_heads, head_dim if D.ndim == 2 else 1),
        xu=floats(batch, num_heads, seqlen),
        p=floats(batch, num_heads, seqlen),
        q=floats(batch, num_heads, seqlen),
        row_sums=floats(tiles, batch, num_heads, seqlen),
        col_sums=floats(tiles, batch, num_heads, seqlen),
        end_terms=floats(num_chunks, num_heads),
        tile=tile,
    )


def launch_chunk_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    dts: torch.Tensor,
    decay: torch.Tensor,
    runs: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_states: torch.Tensor,
    chunk_gradients: torch.Tensor,
    chunk_factors: torch.Tensor,
    spans: Spans,
) -> ChunkGradients:
    """The gradients of x, B and C and the parts of the others; see the module for shapes."""
    batch, seqlen, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    aligned = tensors_aligned(x, dy, B, C)
    tile = tile_tokens(x.dtype, head_dim=head_dim, state_dim=state_dim, aligned=aligned)
    num_tiles = spans.num_chunks * (CHUNK // tile)
    heads = num_heads // num_groups
    blocks = count_head_blocks(num_tiles=num_tiles, num_groups=num_groups, heads_per_group=heads)
    heads_per_block = triton.cdiv(heads, blocks)
    blocks = triton.cdiv(heads, heads_per_block)

    if D is not None and D.ndim == 2:
        # Another stride would cost registers in every program, and it is small.
        D = D.contiguous()
    made = _empty_gradients(x, B, D=D, blocks=blocks, tile=tile, num_chunks=spans.num_chunks)
    chunk_backward_kernel[(3 * num_tiles * num_groups * blocks,)](
        x,
        dy,
        B,
        C,
        x if D is None else D,
        dts,
        decay,
        decay if runs is None else runs,
        decay if cu_seqlens is None else cu_seqlens,
        chunk_states,
        chunk_gradients,
        chunk_factors,
        made.dx,
        made.partial_b,
        made.partial_c,
        decay if made.partial_d is None else made.partial_d,
        made.xu,
        made.p,
        made.q,
        made.row_sums,
        made.col_sums,
        made.end_terms,
        seqlen,
        batch,
        spans.num_seqs,
        num_heads,
        num_groups,
        blocks,
        heads_per_block,
        *x.stride(),
        *dy.stride(),
        *B.stride(),
        *C.stride(),
        0 if D is None else D.stride(0),
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        WIDE_STATE=state_block(state_dim),
        HAS_D=D is not None,
        D_PER_CHANNEL=D is not None and D.ndim == 2,
        PACKED=runs is not None,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
        TILE=tile,
    )
    return made
