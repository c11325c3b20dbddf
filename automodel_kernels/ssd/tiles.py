"""What every SSD kernel shares: how tokens are cut into spans, how tiles are read, and how decay is put together.

A *sequence* is what the recurrence runs through: a row of the batch, or with cu_seqlens a document of the only row.
Its tokens are cut into spans that begin at its own first token, and no span reaches into another sequence:

    block     64 tokens   the stored decay L is the inclusive sum of dt * A since its block's start
    chunk    256 tokens   a state is kept for the backward at each chunk's start
    segment  a multiple of 256 tokens, chosen by the host: what one program of the forward walks through

A tile is what a kernel multiplies at a time: 32 or 64 tokens, so that it lies in one block. With seq_idx a sequence
holds several documents; `run` then counts, from 0 at the chunk's predecessor, the borders since the chunk's start:
tokens of a chunk are of one document where their runs are equal, and of the document before the chunk where it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from automodel_kernels.spans import count_spans, find_span, spans_before, tile_pointers

if TYPE_CHECKING:
    import torch

__all__ = [
    "BLOCK",
    "CHUNK",
    "Spans",
    "block_totals",
    "find_span",
    "spans_before",
    "state_block",
    "state_pointers",
    "tile_pointers",
    "total_between",
]

BLOCK = 64
CHUNK = 256
LONGEST_SEGMENT = 1024

# Programs that the forward wants before it takes longer segments: four for each of an H200's 132 multiprocessors. A
# constant, so that results do not depend on the GPU.
WANTED_PROGRAMS = 528

BLOCK_TOKENS = tl.constexpr(BLOCK)
CHUNK_TOKENS = tl.constexpr(CHUNK)
BLOCKS_IN_CHUNK = tl.constexpr(CHUNK // BLOCK)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """How many sequences, chunks and segments there are; numbers of the host, which never waits for a GPU.

    With cu_seqlens the numbers of chunks and segments are bounds: what lies beyond the last one is empty.

    Attributes:
        seqlen: tokens in a row of the batch.
        num_seqs: rows, or documents.
        segment: tokens in a segment.
        num_segments: of all sequences.
        num_chunks: of all sequences.
    """

    seqlen: int
    num_seqs: int
    segment: int
    num_segments: int
    num_chunks: int

    @staticmethod
    def of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Spans:
        """The spans of x [batch, seqlen, heads, dim], and of cu_seqlens [num_seqs + 1] if the row is packed."""
        batch, seqlen, heads, _ = x.shape
        segment = LONGEST_SEGMENT
        while segment > CHUNK and batch * heads * -(-seqlen // segment) < WANTED_PROGRAMS:
            segment //= 2
        varlen = cu_seqlens is not None
        num_seqs = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return Spans(
            seqlen=seqlen,
            num_seqs=num_seqs,
            segment=segment,
            num_segments=count_spans(num_seqs=num_seqs, seqlen=seqlen, span=segment, varlen=varlen),
            num_chunks=count_spans(num_seqs=num_seqs, seqlen=seqlen, span=CHUNK, varlen=varlen),
        )


def state_block(state_dim: int) -> int:
    """The width of tiles that hold a whole state dimension, BLOCK_N: a power of two, and what a dot takes at least."""
    return max(16, int(triton.next_power_of_2(state_dim)))


@triton.jit
def state_pointers(
    states_ptr,
    place,
    head,
    num_heads,
    offs_p,
    offs_n,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
):
    """The addresses of a tile [P, N] of the state number `place` of a head, in contiguous states [.., heads, P, N]."""
    base_ptr = states_ptr + (place * num_heads.to(tl.int64) + head) * (HEAD_DIM * STATE_DIM)
    return tile_pointers(base_ptr, offs_p, STATE_DIM, offs_n, 1, STATE_DIM % 8 == 0)


@triton.jit
def block_totals(decay_ptr, start, end):
    """The decay of each block of the chunk that begins at token `start`, a [4] vector; 0 for blocks beyond `end`.

    decay_ptr points at the row of the sequence's head: its element t is L of token t.
    """
    firsts = start + tl.arange(0, BLOCKS_IN_CHUNK) * BLOCK_TOKENS
    lasts = tl.minimum(firsts + BLOCK_TOKENS, end) - 1
    return tl.load(decay_ptr + lasts, mask=firsts < end, other=0.0)


@triton.jit
def total_between(totals, first, last):
    """The decay of the blocks `first` to before `last` of a chunk, from `block_totals`: one sum in a fixed order."""
    offs = tl.arange(0, BLOCKS_IN_CHUNK)
    return tl.sum(tl.where((offs >= first) & (offs < last), totals, 0.0), axis=0)
