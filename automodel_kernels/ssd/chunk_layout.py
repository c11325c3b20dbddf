"""How the tokens of a batch are laid out in chunks, each of which belongs to one document.

A *sequence* is what the states pass through: a row of the batch, or a document of cu_seqlens in the only row. Within
a sequence the state is dropped where seq_idx changes; a *run* lies between two such places. Every run begins at a chunk
of its own, so that no chunk needs masks for borders, and padding fills its last one.

Chunks are sorted by *step*, the chunk's number in its sequence, and within a step the longest sequences come first. So
the chunks of a step lie side by side, and they are those of the first so many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ChunkLayout", "lay_out"]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Which token stands where.

    Attributes:
        tokens: [chunks, chunk] int64, numbers of tokens in the batch's rows one after the other; 0 for padding.
        padding: [chunks, chunk] bool; None if there is none.
        steps: chunks `steps[i]` to `steps[i + 1]` are step i.
        sequences: [count] int64, the sequences that have tokens, longest first.
        fresh: [chunks] bool, whether a chunk starts without the state of the one before it in its sequence; None if
            none does.
    """

    tokens: torch.Tensor
    padding: torch.Tensor | None
    steps: tuple[int, ...]
    sequences: torch.Tensor
    fresh: torch.Tensor | None

    def gather(self, rows: torch.Tensor, chunks: slice, *, out: torch.Tensor) -> torch.Tensor:
        """Some chunks of a tensor, with zeros for padding.

        Args:
            rows: [batch * seqlen, width].
            chunks: which.
            out: [number of chunks, chunk, width], contiguous, of the same dtype; overwritten and returned.
        """
        torch.index_select(rows, 0, self.tokens[chunks].flatten(), out=out.flatten(0, 1))
        if self.padding is not None:
            out.masked_fill_(self.padding[chunks, :, None], 0)
        return out

    def scatter(self, chunked: torch.Tensor, chunks: slice, *, out: torch.Tensor) -> None:
        """The inverse of `gather`: puts chunks into their places in `out`, [batch * seqlen, width], without padding."""
        tokens, rows = self.tokens[chunks].flatten(), chunked.flatten(0, 1).flatten(1).to(out.dtype)
        if self.padding is not None:
            valid = ~self.padding[chunks].flatten()
            tokens, rows = tokens[valid], rows[valid]
        out.index_copy_(0, tokens, rows)

    def blocks(self, *, most_chunks: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Successive steps whose chunks are worked on together.

        Args:
            most_chunks: in a block of more than one step.

        Yields:
            The block's chunks, and the bounds of its steps counted from the first of them.
        """
        first = 0
        while first < len(self.steps) - 1:
            last = first + 1
            while last < len(self.steps) - 1 and self.steps[last + 1] - self.steps[first] <= most_chunks:
                last += 1
            begin = self.steps[first]
            yield slice(begin, self.steps[last]), tuple(each - begin for each in self.steps[first : last + 1])
            first = last


def lay_out(
    *,
    batch: int,
    seqlen: int,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    costs: Mapping[int, float],
) -> ChunkLayout:
    """Lays out a batch.

    Args:
        batch: its rows.
        seqlen: tokens of a row.
        seq_idx: [batch, seqlen] integers.
        cu_seqlens: [documents + 1] integers from 0 to seqlen.
        costs: what a token costs by the length of the chunks that are to be had; that which costs least in all, padding
            included, is taken.
    """
    if seq_idx is None and cu_seqlens is None:
        return _lay_out_rows(batch, seqlen, _cheapest(costs, torch.tensor([seqlen])))
    total = batch * seqlen
    bounds = torch.arange(batch + 1) * seqlen if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64)
    filled = (bounds.diff() > 0).nonzero().flatten()
    starts = torch.zeros(total, dtype=torch.bool)
    starts[bounds[:-1][filled]] = True
    borders = starts
    if seq_idx is not None:
        ids = seq_idx.flatten().cpu()
        borders = starts.clone()
        borders[1:] |= ids[1:] != ids[:-1]
    run_starts = borders.nonzero().flatten()
    run_lengths = torch.cat((run_starts, bounds[-1:])).diff()
    chunk = _cheapest(costs, run_lengths)

    run_chunks = (run_lengths + chunk - 1) // chunk
    runs = torch.arange(len(run_starts)).repeat_interleave(run_chunks)
    offsets = _ranks(run_chunks, runs) * chunk
    sequences = (starts[run_starts].cumsum(0) - 1)[runs]
    counts = sequences.bincount(minlength=len(filled))
    longest_first = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(rank))
    steps = _ranks(counts, sequences)
    order = (steps * len(filled) + rank[sequences]).argsort()

    within = torch.arange(chunk)
    tokens = (run_starts[runs] + offsets)[order, None] + within
    valid = within < (run_lengths[runs] - offsets)[order, None]
    fresh = ((offsets == 0) & ~starts[run_starts][runs])[order]
    return ChunkLayout(
        tokens=tokens.masked_fill_(~valid, 0),
        padding=None if valid.all() else ~valid,
        steps=(0, *steps.bincount().cumsum(0).tolist()),
        sequences=filled[longest_first],
        fresh=fresh if fresh.any() else None,
    )


def _cheapest(costs: Mapping[int, float], run_lengths: torch.Tensor) -> int:
    """The length of chunks with which runs cost least, their padding included."""
    return min(costs, key=lambda chunk: costs[chunk] * chunk * int((-(-run_lengths // chunk)).sum()))


def _lay_out_rows(batch: int, seqlen: int, chunk: int) -> ChunkLayout:
    """The layout of rows that are one run each, which needs no sorting."""
    places = torch.arange(-(-seqlen // chunk) * chunk).view(-1, 1, chunk)
    tokens = (places + torch.arange(batch)[:, None] * seqlen).view(-1, chunk)
    padding = (places >= seqlen).expand(-1, batch, -1).reshape(-1, chunk) if seqlen % chunk else None
    return ChunkLayout(
        tokens=tokens if padding is None else tokens.masked_fill_(padding, 0),
        padding=padding,
        steps=tuple(range(0, len(tokens) + 1, max(batch, 1))),
        sequences=torch.arange(batch if seqlen else 0),
        fresh=None,
    )


def _ranks(counts: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """The number of each item within its owner; the items of an owner lie side by side, `counts` of them."""
    return torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
