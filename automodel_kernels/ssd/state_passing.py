"""Passes a state through the spans of a sequence: SSD's segments forwards, its chunks backwards for the gradient.

For span k of a sequence, with its factor f_k (the decay through it; 0 if a document begins in it) and what its own
tokens add, local_k:

    forwards    E_0 = initial or 0        E_{k+1} = f_k E_k + local_k       E_k enters span k
    backwards   G_{n-1} = dfinal or 0     G_{k-1} = f_k G_k + local_k       G_k exits span k, G_{-1} = dinitial

In place: local_k is replaced by E_k or G_k. Shapes: states [num_spans, heads, P, N] in x's dtype, factors [num_spans,
heads] fp32, start and end [sequences, heads, P, N], the end in fp32. The state that is carried is fp32. A program
carries a piece of one head's state through one sequence, in order; spans are loaded ahead of their turn.

Bytes: each state read and written once. Two FLOPs an element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import spans_before
from automodel_kernels.ssd.tiles import CHUNK
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from automodel_kernels.ssd.tiles import Spans

__all__ = ["launch_pass_gradients", "launch_pass_states", "pass_states_kernel"]


@tuned(
    space=spaces.SSD_STATE_PASSING,
    key=("states_ptr", "HEAD_DIM", "STATE_DIM"),
    outputs=("states_ptr", "end_ptr"),
    restores=("states_ptr",),
)
@triton.jit(
    do_not_specialize=[
        "states_ptr",
        "factors_ptr",
        "start_ptr",
        "end_ptr",
        "cu_seqlens_ptr",
        "seqlen",
        "num_heads",
        "span",
        "keep_first",
        "write_end",
        "stride_start_seq",
        "stride_start_head",
        "stride_start_dim",
        "stride_start_state",
    ]
)
def pass_states_kernel(
    states_ptr,
    factors_ptr,
    start_ptr,
    end_ptr,
    cu_seqlens_ptr,
    seqlen: tl.int32,
    num_heads: tl.int32,
    span: tl.int32,
    keep_first: tl.int32,
    write_end: tl.int32,
    stride_start_seq: tl.int64,
    stride_start_head: tl.int64,
    stride_start_dim: tl.int64,
    stride_start_state: tl.int64,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HAS_START: tl.constexpr,
    VARLEN: tl.constexpr,
    REVERSED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS_AHEAD: tl.constexpr,
):
    """One program per sequence, head and piece of its state, pieces fastest."""
    num_pieces = tl.cdiv(HEAD_DIM * STATE_DIM, BLOCK)
    pid = tl.program_id(0)
    pid_piece = pid % num_pieces
    head = (pid // num_pieces % num_heads).to(tl.int64)
    seq = pid // num_pieces // num_heads

    first = spans_before(cu_seqlens_ptr, seqlen, seq, span, VARLEN)
    if VARLEN:
        begin = tl.load(cu_seqlens_ptr + seq).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int32)
        num_spans = tl.cdiv(end - begin, span)
    else:
        num_spans = tl.cdiv(seqlen, span)

    offs = pid_piece * BLOCK + tl.arange(0, BLOCK)
    mask = offs < HEAD_DIM * STATE_DIM
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_START:
        start_ptr += seq.to(tl.int64) * stride_start_seq + head * stride_start_head
        dims = (offs // STATE_DIM).to(tl.int64) * stride_start_dim + (offs % STATE_DIM).to(
            tl.int64
        ) * stride_start_state
        state = tl.load(start_ptr + dims, mask=mask, other=0.0).to(tl.float32)

    head_size = HEAD_DIM * STATE_DIM
    for step in tl.range(0, num_spans, num_stages=LOADS_AHEAD + 1):
        # Forwards the last span adds to no other's state, and what it adds is not in memory.
        number = first + (num_spans - 1 - step if REVERSED else step)
        known = REVERSED or step < num_spans - 1
        row = number * num_heads.to(tl.int64) + head
        ptrs = states_ptr + row * head_size + offs
        ptrs = tl.multiple_of(tl.max_contiguous(ptrs, BLOCK), 16)
        local = tl.load(ptrs, mask=mask & known, other=0.0).to(tl.float32)
        factor = tl.load(factors_ptr + row, mask=known, other=0.0)
        kept = HAS_START or step > 0 or keep_first != 0
        tl.store(ptrs, state.to(states_ptr.dtype.element_ty), mask=mask & kept)
        state = factor * state + local

    # Forwards the scan writes the state after a sequence's last token; without a token it is the initial state.
    if (REVERSED or num_spans == 0) and write_end != 0:
        end_ptrs = end_ptr + (seq * num_heads.to(tl.int64) + head) * head_size + offs
        tl.store(end_ptrs, state, mask=mask)


def _launch(
    states: torch.Tensor,
    factors: torch.Tensor,
    *,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spans: Spans,
    span: int,
    keep_first: bool,
    backwards: bool,
) -> None:
    _, num_heads, head_dim, state_dim = states.shape

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (spans.num_seqs * num_heads * triton.cdiv(head_dim * state_dim, meta["BLOCK"]),)

    pass_states_kernel[grid](
        states,
        factors,
        factors if start is None else start,
        factors if end is None else end,
        factors if cu_seqlens is None else cu_seqlens,
        spans.seqlen,
        num_heads,
        span,
        int(keep_first),
        int(end is not None),
        *((0, 0, 0, 0) if start is None else start.stride()),
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        HAS_START=start is not None,
        VARLEN=cu_seqlens is not None,
        REVERSED=backwards,
    )


def launch_pass_states(
    states: torch.Tensor,
    factors: torch.Tensor,
    *,
    initial_states: torch.Tensor | None,
    final_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spans: Spans,
    keep_first: bool,
) -> None:
    """Turns what each segment adds to the state into the state that enters it, in place.

    Args:
        states: [num_segments, heads, P, N] in x's dtype; of the last segment of a sequence nothing is read.
        factors: [num_segments, heads] fp32; likewise.
        initial_states: [num_seqs, heads, P, N] of any floating dtype and strides; None for 0.
        final_states: [num_seqs, heads, P, N] fp32; written here only for sequences without tokens.
        cu_seqlens: [num_seqs + 1] int32 or int64; None for a sequence per row.
        spans: of the sequences.
        keep_first: without initial_states, whether to write the zeros that enter the first segments.
    """
    _launch(
        states,
        factors,
        start=initial_states,
        end=final_states,
        cu_seqlens=cu_seqlens,
        spans=spans,
        span=spans.segment,
        keep_first=keep_first,
        backwards=False,
    )


def launch_pass_gradients(
    chunk_gradients: torch.Tensor,
    chunk_factors: torch.Tensor,
    *,
    dfinal_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spans: Spans,
    need_initial: bool,
) -> torch.Tensor | None:
    """Turns what each chunk adds to the gradient of the state into the gradient of the state that exits it, in place.

    Args:
        chunk_gradients: [num_chunks, heads, P, N] in x's dtype.
        chunk_factors: [num_chunks, heads] fp32.
        dfinal_states: [num_seqs, heads, P, N], the gradient of the final states, of any floating dtype and strides;
            None for 0.
        cu_seqlens: as for `launch_pass_states`.
        spans: of the sequences.
        need_initial: whether the gradient of the initial states is wanted.

    Returns:
        The gradient of the initial states, [num_seqs, heads, P, N] fp32; None if not wanted.
    """
    dinitial = None
    if need_initial:
        shape = (spans.num_seqs, *chunk_gradients.shape[1:])
        dinitial = chunk_gradients.new_empty(shape, dtype=torch.float32)
    _launch(
        chunk_gradients,
        chunk_factors,
        start=dfinal_states,
        end=dinitial,
        cu_seqlens=cu_seqlens,
        spans=spans,
        span=CHUNK,
        keep_first=True,
        backwards=True,
    )
    return dinitial
