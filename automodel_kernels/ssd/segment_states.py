"""SSD's first kernel: the step sizes, the decay, and what each segment by itself adds to the state.

For a segment of up to 1,024 tokens of one head, with x [P] and B [N] of a token and the scalar A < 0:

    dt_t   = clamp(softplus(dt_raw_t + dt_bias))        a_t = dt_t A
    L_t    = sum of a from the start of t's block of 64 tokens to t
    state  = sum over t of exp(decay from t to the segment's end) dt_t x_t B_t^T            [P, N]
    factor = exp(sum of a over the segment)

With seq_idx only the tokens of the segment's last document add to the state, and the factor is 0 if a document begins
in the segment. `runs` then says how many documents have begun since the start of a token's chunk; see `tiles`.

A program does one segment, one head and one block of P. It walks through tiles of tokens: the state is kept in fp32 and
takes operands of x's dtype, everything element-wise is fp32. The first block of P writes dt and L, of which every other
kernel reads the same bits; of a sequence's last segment nothing else is needed.

Bytes: x, B and dt read once, dt and L written in fp32, a state of x's dtype for every segment. 2 P N FLOPs a token and
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import find_span, tile_pointers
from automodel_kernels.ssd.tiles import BLOCK_TOKENS, CHUNK_TOKENS, state_block, state_pointers
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from automodel_kernels.ssd.tiles import Spans

__all__ = ["SegmentStates", "launch_segment_states", "segment_states_kernel"]

# exp of it is 0 in fp32. A decay below it would be as good, but the difference of two infinite ones is a NaN.
LEAST_DECAY = tl.constexpr(-128.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to fp32's precision for small results too, without a logarithm.

    With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) = 2 artanh(s) for s = e / (2 + e) <= 1/3, whose
    series converges to fp32 in eight terms.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 15.0
    series = series * q + 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    return tl.where(x > 0.0, x, 0.0) + 2.0 * (s + s * q * series)


@triton.jit
def step_sizes(dt, bias, dt_min, dt_max, DT_SOFTPLUS: tl.constexpr):
    """dt after bias, softplus and clamp, in fp32; a NaN stays one."""
    dt += bias
    if DT_SOFTPLUS:
        dt = softplus(dt)
    dt = tl.where(dt < dt_min, dt_min, dt)
    return tl.where(dt > dt_max, dt_max, dt)


@triton.jit
def prepare_tile(
    dt_ptr,
    seq_idx_ptr,
    dts_ptr,
    decay_ptr,
    runs_ptr,
    first,
    start,
    begin,
    stop,
    A,
    bias,
    dt_min,
    dt_max,
    decay_before,
    run_before,
    stride_dt_token,
    stride_seq_idx_token,
    writes,
    writes_runs,
    DT_SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """dt, L and run of the tile that begins at `first`, written if asked; L and run of the token before; of the last.

    Pointers are those of the head's first token. decay_before and run_before are those of the former tile's last token.
    """
    offs_t = first + tl.arange(0, BLOCK_T)
    mask_t = offs_t < stop
    last = tl.minimum(first + BLOCK_T, stop) - 1
    wide_t = offs_t.to(tl.int64)

    dt = tl.load(dt_ptr + wide_t * stride_dt_token, mask=mask_t, other=0.0).to(tl.float32)
    # A token that is not there changes nothing.
    dts = tl.where(mask_t, step_sizes(dt, bias, dt_min, dt_max, DT_SOFTPLUS), 0.0)
    decay = dts * A
    decay = tl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
    decay_before = tl.where((first - start) % BLOCK_TOKENS == 0, 0.0, decay_before)
    decay = decay_before + tl.cumsum(decay, axis=0)
    decay_last = tl.sum(tl.where(offs_t == last, decay, 0.0), axis=0)
    tl.store(dts_ptr + offs_t, dts, mask=mask_t & writes)
    tl.store(decay_ptr + offs_t, decay, mask=mask_t & writes)

    run = tl.zeros([BLOCK_T], dtype=tl.int32)
    run_last = run_before
    if PACKED:
        run_before = tl.where((first - start) % CHUNK_TOKENS == 0, 0, run_before)
        document = tl.load(seq_idx_ptr + wide_t * stride_seq_idx_token, mask=mask_t, other=0)
        mask_before = mask_t & (offs_t > begin)
        before = tl.load(seq_idx_ptr + (wide_t - 1) * stride_seq_idx_token, mask=mask_before, other=0)
        run = run_before + tl.cumsum((mask_before & (document != before)).to(tl.int32), axis=0)
        run_last = tl.max(run, axis=0)
        tl.store(runs_ptr + offs_t, run, mask=mask_t & writes_runs)
    return dts, decay, run, decay_before, run_before, decay_last, run_last


@tuned(
    space=spaces.SSD_SEGMENT_STATES,
    key=("x_ptr", "HEAD_DIM", "BLOCK_N", "ALIGNED", "PACKED"),
    outputs=("dts_ptr", "decay_ptr", "runs_ptr", "states_ptr", "factors_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "x_ptr",
        "dt_ptr",
        "A_ptr",
        "B_ptr",
        "dt_bias_ptr",
        "seq_idx_ptr",
        "cu_seqlens_ptr",
        "dts_ptr",
        "decay_ptr",
        "runs_ptr",
        "states_ptr",
        "factors_ptr",
        "num_seqs",
        "seqlen",
        "num_heads",
        "heads_per_group",
        "segment",
        "dt_min",
        "dt_max",
        "stride_x_batch",
        "stride_x_token",
        "stride_x_head",
        "stride_x_dim",
        "stride_dt_batch",
        "stride_dt_token",
        "stride_dt_head",
        "stride_A",
        "stride_B_batch",
        "stride_B_token",
        "stride_B_group",
        "stride_B_state",
        "stride_dt_bias",
        "stride_seq_idx_batch",
        "stride_seq_idx_token",
    ]
)
def segment_states_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    dt_bias_ptr,
    seq_idx_ptr,
    cu_seqlens_ptr,
    dts_ptr,
    decay_ptr,
    runs_ptr,
    states_ptr,
    factors_ptr,
    num_seqs: tl.int32,
    seqlen: tl.int32,
    num_heads: tl.int32,
    heads_per_group: tl.int32,
    segment: tl.int32,
    dt_min,
    dt_max,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_x_dim: tl.int64,
    stride_dt_batch: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_A: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_B_state: tl.int64,
    stride_dt_bias: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
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
    writes = pid_p == 0
    writes_runs = writes & (head == 0)

    batch = head * 0 if VARLEN else seq.to(tl.int64)
    group = head // heads_per_group
    dt_ptr += batch * stride_dt_batch + head * stride_dt_head
    seq_idx_ptr += batch * stride_seq_idx_batch
    row = (batch * num_heads + head) * seqlen
    dts_ptr += row
    decay_ptr += row
    runs_ptr += batch * seqlen
    A = tl.load(A_ptr + head * stride_A).to(tl.float32)
    bias = 0.0
    if HAS_DT_BIAS:
        bias = tl.load(dt_bias_ptr + head * stride_dt_bias).to(tl.float32)

    decay_last = 0.0
    run_last = 0
    if stop < end:
        x_ptr += batch * stride_x_batch + head * stride_x_head
        B_ptr += batch * stride_B_batch + group * stride_B_group
        offs_p = pid_p * DIMS + tl.arange(0, DIMS)
        offs_n = tl.arange(0, BLOCK_N)
        mask_n = offs_n < STATE_DIM
        state = tl.zeros([DIMS, BLOCK_N], dtype=tl.float32)
        factor = 1.0
        for first in range(start, stop, BLOCK_T):
            dts, decay, run, decay_before, run_before, decay_last, run_last = prepare_tile(
                dt_ptr, seq_idx_ptr, dts_ptr, decay_ptr, runs_ptr, first, start, begin, stop, A, bias, dt_min, dt_max,
                decay_last, run_last, stride_dt_token, stride_seq_idx_token, writes, writes_runs,
                DT_SOFTPLUS, PACKED, BLOCK_T,
            )  # fmt: skip
            weight = tl.exp(decay_last - decay) * dts
            kept = tl.exp(decay_last - decay_before)
            if PACKED:
                weight = tl.where(run == run_last, weight, 0.0)
                kept = tl.where(run_before == run_last, kept, 0.0)
            offs_t = first + tl.arange(0, BLOCK_T)
            mask_t = offs_t < stop
            wide_t = offs_t.to(tl.int64)
            x_ptrs = tile_pointers(x_ptr, wide_t, stride_x_token, offs_p, stride_x_dim, ALIGNED)
            B_ptrs = tile_pointers(B_ptr, wide_t, stride_B_token, offs_n, stride_B_state, ALIGNED)
            x = tl.load(x_ptrs, mask=mask_t[:, None], other=0.0)
            B = tl.load(B_ptrs, mask=mask_t[:, None] & mask_n[None, :], other=0.0)
            weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
            state = tl.dot(tl.trans(weighted), B, state * kept, input_precision="ieee")
            factor *= kept
        state_ptrs = state_pointers(states_ptr, number, head, num_heads, offs_p, offs_n, HEAD_DIM, STATE_DIM)
        tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask_n[None, :])
        tl.store(factors_ptr + number * num_heads.to(tl.int64) + head, factor, mask=writes)
    elif writes:
        for first in range(start, stop, BLOCK_T):
            _, _, _, _, _, decay_last, run_last = prepare_tile(
                dt_ptr, seq_idx_ptr, dts_ptr, decay_ptr, runs_ptr, first, start, begin, stop, A, bias, dt_min, dt_max,
                decay_last, run_last, stride_dt_token, stride_seq_idx_token, writes, writes_runs,
                DT_SOFTPLUS, PACKED, BLOCK_T,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SegmentStates:
    """What the first kernel leaves.

    Attributes:
        dts: [batch, heads, seqlen] fp32, dt after bias, softplus and clamp.
        decay: [batch, heads, seqlen] fp32, L.
        runs: [batch, seqlen] int32; None without seq_idx.
        states: [num_segments, heads, P, N] in x's dtype, what each segment adds to the state.
        factors: [num_segments, heads] fp32, what it multiplies the state with. Of the last segment of a sequence
            neither is written.
    """

    dts: torch.Tensor
    decay: torch.Tensor
    runs: torch.Tensor | None
    states: torch.Tensor
    factors: torch.Tensor


def launch_segment_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    spans: Spans,
    aligned: bool,
) -> SegmentStates:
    """The step sizes, the decay, and what each segment adds to the state.

    Args:
        x: [batch, seqlen, heads, P], P a power of two from 16 on.
        dt: [batch, seqlen, heads].
        A: [heads].
        B: [batch, seqlen, groups, N] in x's dtype.
        dt_bias: [heads].
        seq_idx: [batch, seqlen] integers.
        cu_seqlens: [num_seqs + 1] integers.
        dt_softplus: whether dt goes through softplus.
        dt_limit: the least and the largest dt.
        spans: of the sequences.
        aligned: whether x and B can be read 16 bytes at a time.
    """
    batch, seqlen, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    dts = x.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    decay = torch.empty_like(dts)
    runs = None if seq_idx is None else x.new_empty((batch, seqlen), dtype=torch.int32)
    states = x.new_empty((spans.num_segments, num_heads, head_dim, state_dim))
    factors = x.new_empty((spans.num_segments, num_heads), dtype=torch.float32)

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (spans.num_segments * num_heads * triton.cdiv(head_dim, meta["BLOCK_P"]),)

    segment_states_kernel[grid](
        x,
        dt,
        A,
        B,
        x if dt_bias is None else dt_bias,
        x if seq_idx is None else seq_idx,
        x if cu_seqlens is None else cu_seqlens,
        dts,
        decay,
        x if runs is None else runs,
        states,
        factors,
        spans.num_seqs,
        seqlen,
        num_heads,
        num_heads // num_groups,
        spans.segment,
        *dt_limit,
        *x.stride(),
        *dt.stride(),
        A.stride(0),
        *B.stride(),
        0 if dt_bias is None else dt_bias.stride(0),
        *((0, 0) if seq_idx is None else seq_idx.stride()),
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        HAS_DT_BIAS=dt_bias is not None,
        DT_SOFTPLUS=dt_softplus,
        PACKED=seq_idx is not None,
        VARLEN=cu_seqlens is not None,
        ALIGNED=aligned,
        BLOCK_N=state_block(state_dim),
    )
    return SegmentStates(dts=dts, decay=decay, runs=runs, states=states, factors=factors)
