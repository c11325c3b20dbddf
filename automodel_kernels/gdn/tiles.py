"""What every Gated DeltaNet kernel shares: how tokens are cut into spans, how tiles are read, how decay is formed.

A *sequence* is what the recurrence runs through: a row of the batch, or with cu_seqlens a document of the only row.
Its tokens are cut into spans that begin at its own first token, and no span reaches into another sequence:

    chunk    16, 32 or 64 tokens: one step of the walk, and the triangular system that is solved at once
    segment  a multiple of the chunk: what one program walks through; the whole sequence where heads alone fill a GPU

Decay is exp of sums of log gates, g <= 0, and only differences of sums inside a chunk occur. A plain fp32 sum of strong
gates loses the digits of the weak ones after them: at -300 neighbours differ by 3e-5. So every gate is cut into a
multiple of 1/256, whose sums are exact in fp32 in any order, and a rest of at most 1/512, whose sums stay below 1/8:

    E_ts = exp((high_t - high_s) + (low_t - low_s))

is right to fp32 rounding however strong the decay. Pairs that do not exist are masked in the exponent: exp(-inf) = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from automodel_kernels.hardware import current_target
from automodel_kernels.spans import count_spans, find_span, spans_before, tile_pointers

if TYPE_CHECKING:
    import torch

__all__ = [
    "L2NORM_EPS",
    "Spans",
    "choose_chunk",
    "find_span",
    "gate_parts",
    "gate_sums",
    "load_beta",
    "load_gate",
    "load_rate",
    "load_rated_gate",
    "load_tile",
    "pair_decay",
    "softplus",
    "spans_before",
    "tile_pointers",
]

L2NORM_EPS = tl.constexpr(1e-6)

# Stronger gates decay to 0 in fp32 all the same; with them sums of 64 high parts stay exact: 22 bits.
STRONGEST_GATE = tl.constexpr(-200.0)
HIGH_PARTS = tl.constexpr(256.0)

CHUNKS = (16, 32, 64)
# Where 64 tokens spill or do not fit: on these targets, in fp32, and with keys of more than 128 elements.
SMALLER_CHUNK = 32
TARGETS_OF_SMALLER_CHUNK = ("sm_80", "sm_89")
LARGEST_HEAD = 128

# A split walks the keys' columns, too, so it must be cut into at least three to win. Programs are counted for blocks of
# 32 columns of V; constants, so that results do not depend on the GPU: two programs for each of an H200's 132
# multiprocessors are wanted, and half of that is enough to do without a split.
ENOUGH_PROGRAMS = 128
WANTED_PROGRAMS = 256
COUNTED_BLOCK = 32
FEWEST_SEGMENTS = 3
MOST_SEGMENTS = 16
SHORTEST_SEGMENT = 512


def choose_chunk(q: torch.Tensor, *, chunk_size: int) -> int:
    """Tokens in a chunk: what suits the GPU and the tensors, and no more than asked for.

    It follows from shapes and data types alone, not from addresses, since saved tensors have it in their shape.

    Args:
        q: [batch, seqlen, heads, K] on the device of the launch.
        chunk_size: at least 16.
    """
    smaller = (
        q.element_size() > 2 or q.shape[-1] > LARGEST_HEAD or current_target(q.device).name in TARGETS_OF_SMALLER_CHUNK
    )
    most = min(chunk_size, SMALLER_CHUNK if smaller else CHUNKS[-1])
    return max(each for each in CHUNKS if each <= most)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """How many sequences, chunks and segments there are; numbers of the host, which never waits for a GPU.

    With cu_seqlens the numbers of chunks and segments are bounds: what lies beyond the last one is empty.

    Attributes:
        seqlen: tokens in a row of the batch.
        num_seqs: rows, or documents.
        chunk: tokens in a chunk.
        num_chunks: of all sequences.
        segment: tokens in a segment, a multiple of the chunk; longer than a row where nothing is split.
        num_segments: of all sequences.
    """

    seqlen: int
    num_seqs: int
    chunk: int
    num_chunks: int
    segment: int
    num_segments: int

    @property
    def split(self) -> bool:
        """Whether a sequence may have more than one segment."""
        return self.segment < self.seqlen

    @staticmethod
    def of(v: torch.Tensor, cu_seqlens: torch.Tensor | None, *, chunk: int, segment: int | None = None) -> Spans:
        """The spans of v [batch, seqlen, heads, V], and of cu_seqlens [documents + 1] if the row is packed.

        Args:
            v: the values; only the shape counts.
            cu_seqlens: where documents begin, and the end of the last.
            chunk: tokens in a chunk.
            segment: tokens in a segment, a multiple of `chunk`; by default chosen from the shapes.
        """
        batch, seqlen, heads, head_v = v.shape
        varlen = cu_seqlens is not None
        num_seqs = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if segment is None:
            segment = choose_segment(seqlen, programs=num_seqs * heads * -(-head_v // COUNTED_BLOCK))
        return Spans(
            seqlen=seqlen,
            num_seqs=num_seqs,
            chunk=chunk,
            num_chunks=count_spans(num_seqs=num_seqs, seqlen=seqlen, span=chunk, varlen=varlen),
            segment=segment,
            num_segments=count_spans(num_seqs=num_seqs, seqlen=seqlen, span=segment, varlen=varlen),
        )


def choose_segment(seqlen: int, *, programs: int) -> int:
    """Tokens in a segment: a multiple of every chunk, beyond `seqlen` where nothing is to be split.

    Args:
        seqlen: tokens in a row.
        programs: how many there are without a split.
    """
    largest = CHUNKS[-1]
    whole = (seqlen // largest + 1) * largest
    if not programs or programs >= ENOUGH_PROGRAMS:
        return whole
    wanted = min(-(-WANTED_PROGRAMS // programs), MOST_SEGMENTS, seqlen // SHORTEST_SEGMENT)
    if wanted < FEWEST_SEGMENTS:
        return whole
    return -(-seqlen // (wanted * largest)) * largest


@triton.jit
def load_tile(
    base_ptr,
    offs_t,
    stride_token,
    mask_t,
    first,
    stride_dim,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The columns `first` to `first + BLOCK` of some tokens, [tokens, BLOCK] in their dtype; 0 beyond DIM and the mask.

    base_ptr points at token 0 of the row and head; offs_t and the strides are int64.
    """
    offs_d = first + tl.arange(0, BLOCK)
    ptrs = tile_pointers(base_ptr, offs_t, stride_token, offs_d, stride_dim, ALIGNED)
    mask = mask_t[:, None]
    if DIM % BLOCK != 0:
        mask = mask & (offs_d < DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32, with all digits where it is small."""
    grown = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + grown
    # What rounding took from 1 + exp(x) is given back as a factor.
    small = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def load_rate(A_log_ptr, dt_bias_ptr, head, HAS_GATE: tl.constexpr, HAS_GATE_BIAS: tl.constexpr):
    """What a value head's gate is made with, -exp(A_log) and dt_bias in fp32; 1 and 0 where it is given as it is."""
    rate = 1.0
    bias = 0.0
    if HAS_GATE:
        rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
        if HAS_GATE_BIAS:
            bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    return rate, bias


@triton.jit
def load_rated_gate(g_ptr, offs_t, stride_token, mask_t, rate, bias, HAS_GATE: tl.constexpr):
    """The log decay of some tokens in fp32, 0 where masked, with what `load_rate` gave."""
    g = tl.load(g_ptr + offs_t * stride_token, mask=mask_t, other=0.0).to(tl.float32)
    if HAS_GATE:
        g = tl.where(mask_t, rate * softplus(g + bias), 0.0)
    return g


@triton.jit
def load_gate(
    g_ptr,
    offs_t,
    stride_token,
    mask_t,
    A_log_ptr,
    dt_bias_ptr,
    head,
    HAS_GATE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
):
    """The log decay of some tokens in fp32, 0 where masked.

    With HAS_GATE g is what the gate is made of: -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias [heads].
    g_ptr points at token 0 of the row and head; `head` is the value head; offs_t and the stride are int64.
    """
    rate, bias = load_rate(A_log_ptr, dt_bias_ptr, head, HAS_GATE, HAS_GATE_BIAS)
    return load_rated_gate(g_ptr, offs_t, stride_token, mask_t, rate, bias, HAS_GATE)


@triton.jit
def load_beta(
    beta_ptr,
    offs_t,
    stride_token,
    mask_t,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):
    """beta of some tokens in fp32, 0 where masked; with BETA_SIGMOID the sigmoid of what is stored, with NEG_EIGVAL
    twice that.
    """
    beta = tl.load(beta_ptr + offs_t * stride_token, mask=mask_t, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        beta = 1.0 / (1.0 + tl.exp(-beta))
        if NEG_EIGVAL:
            beta *= 2.0
        beta = tl.where(mask_t, beta, 0.0)
    return beta


@triton.jit
def gate_sums(g):
    """Inclusive sums of log gates [tokens] in two parts, high and low; see the module."""
    high, low = gate_parts(g)
    return tl.cumsum(high, axis=0), tl.cumsum(low, axis=0)


@triton.jit
def gate_parts(g):
    """Log gates as multiples of 1/256 and rests of at most 1/512; NaN stays NaN."""
    g = tl.where(g < STRONGEST_GATE, STRONGEST_GATE, g)
    high = tl.floor(g * HIGH_PARTS + 0.5) / HIGH_PARTS
    return high, g - high


@triton.jit
def pair_decay(high_t, low_t, high_s, low_s, mask):
    """E_ts = exp of the difference of two gate sums, [t, s] or what the shapes broadcast to; 0 where masked.

    The four are shaped by the caller: `pair_decay(high[:, None], low[:, None], high[None, :], low[None, :], mask)`.
    """
    gap = (high_t - high_s) + (low_t - low_s)
    return tl.exp(tl.where(mask, gap, -float("inf")))
