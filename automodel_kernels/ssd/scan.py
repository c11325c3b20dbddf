"""SSD's scan: the output, from the states that enter the segments.

For a tile of tokens of one head, with L from the start of the tile, the state S [P, N] that enters it, and t, s tokens:

    y_t = exp(L_t) S C_t + sum over s <= t of exp(L_t - L_s) (C_t . B_s) dt_s x_s
    S  <- exp(L_last) S + sum over s of exp(L_last - L_s) dt_s x_s B_s^T
    out_t = (y_t + D x_t) * silu(z_t)

With seq_idx pairs of tokens of two documents, and S for tokens of a later document, are masked.

A program does one segment, one head and one block of P. The state stays in fp32 in registers from tile to tile, as its
transpose [N, P], which has more rows for the tensor cores; C.B^T is formed where it is used. A dot takes x's dtype and
adds in fp32, everything element-wise is fp32. For the backward the state is kept where a chunk of 256 tokens begins,
and with a gate the output before it.

Bytes: x, z, B, C, dt and L read once, out written, and the state of a segment read. 2 P (2 N + T) + 2 N T FLOPs a token
and head, for tiles of T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import find_span, spans_before, tile_pointers
from automodel_kernels.ssd.tiles import BLOCK_TOKENS, CHUNK, CHUNK_TOKENS, state_block, state_pointers
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from automodel_kernels.ssd.segment_states import SegmentStates
    from automodel_kernels.ssd.tiles import Spans

__all__ = ["Scanned", "launch_scan", "scan_kernel"]


@tuned(
    space=spaces.SSD_SCAN,
    key=("x_ptr", "HEAD_DIM", "BLOCK_N", "ALIGNED", "PACKED"),
    outputs=("out_ptr", "out_ungated_ptr", "chunk_states_ptr", "final_states_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "x_ptr",
        "z_ptr",
        "B_ptr",
        "C_ptr",
        "D_ptr",
        "cu_seqlens_ptr",
        "dts_ptr",
        "decay_ptr",
        "runs_ptr",
        "states_ptr",
        "out_ptr",
        "out_ungated_ptr",
        "chunk_states_ptr",
        "final_states_ptr",
        "num_seqs",
        "seqlen",
        "num_heads",
        "heads_per_group",
        "segment",
        "has_initial",
        "save_ungated",
        "save_chunks",
        "save_final",
        "stride_x_batch",
        "stride_x_token",
        "stride_x_head",
        "stride_x_dim",
        "stride_z_batch",
        "stride_z_token",
        "stride_z_head",
        "stride_z_dim",
        "stride_B_batch",
        "stride_B_token",
        "stride_B_group",
        "stride_B_state",
        "stride_C_batch",
        "stride_C_token",
        "stride_C_group",
        "stride_C_state",
        "stride_D_head",
        "stride_D_dim",
    ]
)
def scan_kernel(
    x_ptr,
    z_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    cu_seqlens_ptr,
    dts_ptr,
    decay_ptr,
    runs_ptr,
    states_ptr,
    out_ptr,
    out_ungated_ptr,
    chunk_states_ptr,
    final_states_ptr,
    num_seqs: tl.int32,
    seqlen: tl.int32,
    num_heads: tl.int32,
    heads_per_group: tl.int32,
    segment: tl.int32,
    has_initial: tl.int32,
    save_ungated: tl.int32,
    save_chunks: tl.int32,
    save_final: tl.int32,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_x_dim: tl.int64,
    stride_z_batch: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_z_dim: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_B_state: tl.int64,
    stride_C_batch: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_C_state: tl.int64,
    stride_D_head: tl.int64,
    stride_D_dim: tl.int64,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HAS_D: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr,
    HAS_Z: tl.constexpr,
    PACKED: tl.constexpr,
    VARLEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program per segment, block of P and head, heads fastest."""
    # A head dimension is a power of two: its tiles need no mask.
    DIMS: tl.constexpr = BLOCK_P if BLOCK_P < HEAD_DIM else HEAD_DIM
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    pid_p = pid // num_heads % (HEAD_DIM // DIMS)
    number = pid // num_heads // (HEAD_DIM // DIMS)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, segment, VARLEN)
    start = begin + index * segment
    stop = tl.minimum(start + segment, end)
    chunk = spans_before(cu_seqlens_ptr, seqlen, seq, CHUNK_TOKENS, VARLEN) + index * (segment // CHUNK_TOKENS)

    batch = head * 0 if VARLEN else seq.to(tl.int64)
    group = head // heads_per_group
    row = (batch * num_heads + head) * seqlen
    dts_ptr += row
    decay_ptr += row
    runs_ptr += batch * seqlen
    x_ptr += batch * stride_x_batch + head * stride_x_head
    z_ptr += batch * stride_z_batch + head * stride_z_head
    B_ptr += batch * stride_B_batch + group * stride_B_group
    C_ptr += batch * stride_C_batch + group * stride_C_group
    stride_out_token = num_heads.to(tl.int64) * HEAD_DIM
    out_ptr += batch * seqlen * stride_out_token + head * HEAD_DIM
    out_ungated_ptr += batch * seqlen * stride_out_token + head * HEAD_DIM

    offs_p = pid_p * DIMS + tl.arange(0, DIMS)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = (offs_n < STATE_DIM)[None, :]
    state_ptrs = state_pointers(states_ptr, number, head, num_heads, offs_p, offs_n, HEAD_DIM, STATE_DIM)
    entered = (start < stop) & ((index > 0) | (has_initial != 0))
    state = tl.trans(tl.load(state_ptrs, mask=mask_n & entered, other=0.0)).to(tl.float32)
    skip = 0.0
    if HAS_D:
        if D_PER_CHANNEL:
            skip = tl.load(D_ptr + head * stride_D_head + offs_p * stride_D_dim).to(tl.float32)[None, :]
        else:
            skip = tl.load(D_ptr + head * stride_D_head).to(tl.float32)

    tile = tl.arange(0, BLOCK_T)
    causal = tile[:, None] >= tile[None, :]
    for first in range(start, stop, BLOCK_T):
        if (save_chunks != 0) & ((first - start) % CHUNK_TOKENS == 0):
            place = chunk + (first - start) // CHUNK_TOKENS
            kept_ptrs = state_pointers(chunk_states_ptr, place, head, num_heads, offs_p, offs_n, HEAD_DIM, STATE_DIM)
            tl.store(kept_ptrs, tl.trans(state.to(chunk_states_ptr.dtype.element_ty)), mask=mask_n)

        offs_t = first + tile
        mask_t = offs_t < stop
        last = tl.minimum(first + BLOCK_T, stop) - 1
        wide_t = offs_t.to(tl.int64)
        dts = tl.load(dts_ptr + offs_t, mask=mask_t, other=0.0)
        # Beyond the end as at it, so that every difference that is used below is <= 0.
        decay_last = tl.load(decay_ptr + last)
        decay = tl.load(decay_ptr + offs_t, mask=mask_t, other=decay_last)
        within = 0.0
        if BLOCK_T < BLOCK_TOKENS:
            within = tl.load(decay_ptr + first - 1, mask=(first - start) % BLOCK_TOKENS != 0, other=0.0)
        pairs = causal
        from_start = tl.exp(decay - within)
        weight = tl.exp(decay_last - decay)
        kept = tl.exp(decay_last - within)
        if PACKED:
            run = tl.load(runs_ptr + offs_t, mask=mask_t, other=0)
            run_last = tl.load(runs_ptr + last)
            run_before = tl.load(runs_ptr + first - 1, mask=(first - start) % CHUNK_TOKENS != 0, other=0)
            pairs = pairs & (run[:, None] == run[None, :])
            from_start = tl.where(run == run_before, from_start, 0.0)
            weight = tl.where(run == run_last, weight, 0.0)
            kept = tl.where(run_before == run_last, kept, 0.0)

        C_ptrs = tile_pointers(C_ptr, wide_t, stride_C_token, offs_n, stride_C_state, ALIGNED)
        C = tl.load(C_ptrs, mask=mask_t[:, None] & mask_n, other=0.0)
        B_ptrs = tile_pointers(B_ptr, wide_t, stride_B_token, offs_n, stride_B_state, ALIGNED)
        B = tl.load(B_ptrs, mask=mask_t[:, None] & mask_n, other=0.0)
        x_ptrs = tile_pointers(x_ptr, wide_t, stride_x_token, offs_p, stride_x_dim, ALIGNED)
        x = tl.load(x_ptrs, mask=mask_t[:, None], other=0.0)

        scores = tl.dot(C, tl.trans(B), input_precision="ieee")
        scores *= tl.exp(tl.where(pairs, decay[:, None] - decay[None, :], float("-inf")))
        y = tl.dot(C, state.to(C.dtype), input_precision="ieee") * from_start[:, None]
        # dt goes with x: as a factor of the scores it would take a register for each of their columns.
        wide_x = x.to(tl.float32)
        stepped = wide_x * dts[:, None]
        y = tl.dot(scores.to(x.dtype), stepped.to(x.dtype), y, input_precision="ieee")
        weighted = (stepped * weight[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(B), weighted, state * kept, input_precision="ieee")

        if HAS_D:
            y += wide_x * skip
        if HAS_Z:
            out_ptrs = tile_pointers(out_ungated_ptr, wide_t, stride_out_token, offs_p, 1, True)
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & (save_ungated != 0))
            z_ptrs = tile_pointers(z_ptr, wide_t, stride_z_token, offs_p, stride_z_dim, ALIGNED)
            z = tl.load(z_ptrs, mask=mask_t[:, None], other=0.0).to(tl.float32)
            y *= z * tl.sigmoid(z)
        out_ptrs = tile_pointers(out_ptr, wide_t, stride_out_token, offs_p, 1, True)
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_t[:, None])

    if (save_final != 0) & (start < stop) & (stop == end):
        final_ptrs = state_pointers(final_states_ptr, seq, head, num_heads, offs_p, offs_n, HEAD_DIM, STATE_DIM)
        tl.store(final_ptrs, tl.trans(state), mask=mask_n)


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What the scan leaves.

    Attributes:
        out: [batch, seqlen, heads, P] in x's dtype.
        chunk_states: [num_chunks, heads, P, N] in x's dtype, the state that enters each chunk; None if not saved.
        out_ungated: as `out`, before the gate; None if not saved or without a gate.
    """

    out: torch.Tensor
    chunk_states: torch.Tensor | None
    out_ungated: torch.Tensor | None


def launch_scan(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    segments: SegmentStates,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    final_states: torch.Tensor | None,
    has_initial: bool,
    save: bool,
    spans: Spans,
    aligned: bool,
) -> Scanned:
    """The output, and with `save` what the backward reads.

    Args:
        x: [batch, seqlen, heads, P], P a power of two from 16 on.
        B: [batch, seqlen, groups, N] in x's dtype.
        C: as B.
        segments: of the first kernel, its states those that enter the segments.
        D: [heads] or [heads, P].
        z: as x.
        cu_seqlens: [num_seqs + 1] integers.
        final_states: [num_seqs, heads, P, N] fp32, written for sequences with tokens; None if not wanted.
        has_initial: whether the first segments have a state.
        save: whether there will be a backward.
        spans: of the sequences.
        aligned: whether x, B, C and z can be read 16 bytes at a time.
    """
    num_heads, head_dim = x.shape[2:]
    num_groups, state_dim = B.shape[2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_ungated = torch.empty_like(out) if save and z is not None else None
    chunk_states = None
    if save:
        # Segments of one chunk have its state already.
        shape = (spans.num_chunks, *segments.states.shape[1:])
        chunk_states = segments.states if spans.segment == CHUNK else x.new_empty(shape)

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (spans.num_segments * num_heads * triton.cdiv(head_dim, meta["BLOCK_P"]),)

    scan_kernel[grid](
        x,
        x if z is None else z,
        B,
        C,
        x if D is None else D,
        x if cu_seqlens is None else cu_seqlens,
        segments.dts,
        segments.decay,
        x if segments.runs is None else segments.runs,
        segments.states,
        out,
        out if out_ungated is None else out_ungated,
        segments.states if chunk_states is None else chunk_states,
        segments.dts if final_states is None else final_states,
        spans.num_seqs,
        spans.seqlen,
        num_heads,
        num_heads // num_groups,
        spans.segment,
        int(has_initial),
        int(out_ungated is not None),
        int(chunk_states is not None and spans.segment != CHUNK),
        int(final_states is not None),
        *x.stride(),
        *((0, 0, 0, 0) if z is None else z.stride()),
        *B.stride(),
        *C.stride(),
        *((0, 0) if D is None else (D.stride(0), D.stride(1) if D.ndim == 2 else 0)),
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        HAS_D=D is not None,
        D_PER_CHANNEL=D is not None and D.ndim == 2,
        HAS_Z=z is not None,
        PACKED=segments.runs is not None,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
        BLOCK_N=state_block(state_dim),
    )
    return Scanned(out=out, chunk_states=chunk_states, out_ungated=out_ungated)
