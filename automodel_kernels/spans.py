"""What kernels that walk through sequences share: how tokens are cut into spans, and how tiles are addressed.

A *sequence* is what a recurrence runs through: a row of the batch, or with cu_seqlens a document of the only row. Its
tokens are cut into spans of equal length that begin at its own first token, and no span reaches into another sequence.
Spans are counted through all sequences; with cu_seqlens the host knows only a bound of their number, since it never
waits for a GPU, and what lies beyond the last one is empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_spans", "find_span", "spans_before", "tile_pointers"]

SEARCHED_AT_ONCE = tl.constexpr(128)


def count_spans(*, num_seqs: int, seqlen: int, span: int, varlen: bool) -> int:
    """The number of spans of all sequences, or with cu_seqlens a bound of it.

    Args:
        num_seqs: rows of the batch, or documents.
        seqlen: tokens in a row.
        span: tokens in a span.
        varlen: whether sequences are documents of one row.
    """
    return seqlen // span + num_seqs if varlen else num_seqs * -(-seqlen // span)


@triton.jit
def find_span(cu_seqlens_ptr, num_seqs, seqlen, number, span, VARLEN: tl.constexpr):
    """The sequence of span `number`, which one of its spans that is, and where the sequence begins and ends.

    Spans are counted through all sequences. Beyond the last one begin and end are both 0. Tokens are counted in the
    row, which is `0 if VARLEN else sequence`.
    """
    if VARLEN:
        seq = 0
        total = 0
        before = 0
        for first in range(0, num_seqs, SEARCHED_AT_ONCE):
            offs = first + tl.arange(0, SEARCHED_AT_ONCE)
            mask = offs < num_seqs
            begins = tl.load(cu_seqlens_ptr + offs, mask=mask, other=0)
            ends = tl.load(cu_seqlens_ptr + offs + 1, mask=mask, other=0)
            counts = ((ends - begins + span - 1) // span).to(tl.int32)
            totals = total + tl.cumsum(counts, axis=0)
            passed = mask & (totals <= number)
            seq += tl.sum(passed.to(tl.int32), axis=0)
            before = tl.maximum(before, tl.max(tl.where(passed, totals, 0), axis=0))
            total += tl.sum(counts, axis=0)
        inside = seq < num_seqs
        begin = tl.load(cu_seqlens_ptr + seq, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + seq + 1, mask=inside, other=0).to(tl.int32)
        index = number - before
    else:
        spans = (seqlen + span - 1) // span
        seq = number // spans
        index = number % spans
        begin = 0
        end = seqlen
    return seq, index, begin, end


@triton.jit
def spans_before(cu_seqlens_ptr, seqlen, seq, span, VARLEN: tl.constexpr):
    """How many spans all sequences before `seq` have together."""
    if VARLEN:
        total = 0
        for first in range(0, seq, SEARCHED_AT_ONCE):
            offs = first + tl.arange(0, SEARCHED_AT_ONCE)
            mask = offs < seq
            begins = tl.load(cu_seqlens_ptr + offs, mask=mask, other=0)
            ends = tl.load(cu_seqlens_ptr + offs + 1, mask=mask, other=0)
            total += tl.sum(((ends - begins + span - 1) // span).to(tl.int32), axis=0)
    else:
        total = seq * ((seqlen + span - 1) // span)
    return total


@triton.jit
def tile_pointers(base_ptr, offs_m, stride_m, offs_n, stride_n, ALIGNED: tl.constexpr):
    """The addresses of a tile [M, N]; base_ptr, and offs_m * stride_m, in int64.

    Arguments are not specialised, so only the hint tells the compiler that 16 bytes may be moved at a time.
    """
    if ALIGNED:
        ptrs = base_ptr + (offs_m * stride_m)[:, None] + offs_n[None, :]
        ptrs = tl.multiple_of(tl.max_contiguous(ptrs, (1, offs_n.shape[0])), (1, 16))
    else:
        ptrs = base_ptr + (offs_m * stride_m)[:, None] + (offs_n * stride_n)[None, :]
    return ptrs
