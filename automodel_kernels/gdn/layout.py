"""How the torch path lays tokens out: each sequence cut into chunks of its own, value heads of one group apart.

A *sequence* is a row of the batch or, with cu_seqlens, a document of the only row. A *step* is one chunk of every row:
rows have their chunks side by side in the same step, documents follow one another. A tensor [batch, seqlen, heads,
dim] becomes [group, steps, batch * heads / group, chunk, dim], where `group` is how many value heads share a query
head; what fills a sequence's last chunk up is zero. Steps are handled in segments, so that temporaries stay small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Layout", "Sizes"]

LARGEST_CHUNK = 32
SMALLEST_CHUNK = 16
# Elements of a value-like tensor of one segment: a few of them together fit a CPU's cache.
SEGMENT_ELEMENTS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What follows from shapes alone.

    Attributes:
        chunk: tokens in a chunk.
        group: value heads that share a query head.
        most_steps: a bound of the number of steps; without cu_seqlens the number itself.
        segment: steps in a segment; the last one may be shorter.
    """

    chunk: int
    group: int
    most_steps: int
    segment: int

    @staticmethod
    def of(q: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None, chunk_size: int) -> Sizes:
        """The sizes for q [batch, seqlen, heads, key_dim] and v [batch, seqlen, value_heads, value_dim].

        Chunks have at most `chunk_size` tokens, and no more than has been found to be fast.
        """
        rows, seqlen, value_heads, value_dim = v.shape
        chunk = SMALLEST_CHUNK
        while chunk < min(chunk_size, LARGEST_CHUNK, seqlen):
            chunk *= 2
        width = rows * value_heads * chunk * max(q.shape[3], value_dim)
        return Sizes(
            chunk=chunk,
            group=value_heads // q.shape[2],
            most_steps=-(-seqlen // chunk) if cu_seqlens is None else seqlen // chunk + cu_seqlens.shape[0] - 1,
            segment=max(1, SEGMENT_ELEMENTS // max(1, width)),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The chunks of a batch.

    Attributes:
        sizes: those that shapes say.
        seqlen: tokens in a row.
        rows: of the batch.
        num_steps: steps.
        begins: by step, which sequences begin there.
        ends: by step, which sequences end with it.
        tokens: with cu_seqlens the token at each place, [num_steps * chunk]; 0 where there is none.
        filled: with cu_seqlens, where there is one, [num_steps * chunk].
    """

    sizes: Sizes
    seqlen: int
    rows: int
    num_steps: int
    begins: Mapping[int, slice]
    ends: Mapping[int, slice]
    tokens: torch.Tensor | None = None
    filled: torch.Tensor | None = None

    @staticmethod
    def of(q: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None, chunk_size: int) -> Layout:
        """The layout of q [batch, seqlen, heads, key_dim] and v [batch, seqlen, value_heads, value_dim]."""
        sizes = Sizes.of(q, v, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
        rows, seqlen, chunk = v.shape[0], v.shape[1], sizes.chunk
        if cu_seqlens is None:
            steps, every_row = sizes.most_steps if rows else 0, slice(0, rows)
            begins, ends = ({0: every_row}, {steps - 1: every_row}) if steps else ({}, {})
            return Layout(sizes=sizes, seqlen=seqlen, rows=rows, num_steps=steps, begins=begins, ends=ends)
        borders = cu_seqlens.to("cpu", torch.int64)
        lengths = borders.diff()
        counts = (lengths + chunk - 1) // chunk
        lasts = counts.cumsum(0)
        firsts = lasts - counts
        tokens = torch.arange(int(borders[0]), int(borders[-1]))
        places = torch.repeat_interleave(firsts * chunk - borders[:-1], lengths) + tokens
        steps = int(counts.sum())
        at_places = tokens.new_zeros(steps * chunk).index_copy_(0, places, tokens)
        filled = torch.zeros(steps * chunk, dtype=torch.bool).index_fill_(0, places, 1)
        numbers = counts.nonzero().flatten().tolist()
        return Layout(
            sizes=sizes,
            seqlen=seqlen,
            rows=rows,
            num_steps=steps,
            begins={int(firsts[each]): slice(each, each + 1) for each in numbers},
            ends={int(lasts[each]) - 1: slice(each, each + 1) for each in numbers},
            tokens=at_places.to(v.device),
            filled=filled.to(v.device),
        )

    def segments(self) -> Iterator[tuple[int, int]]:
        """The first step of each segment and the one after its last."""
        for first in range(0, self.num_steps, self.sizes.segment):
            yield first, min(first + self.sizes.segment, self.num_steps)

    def take(
        self, x: torch.Tensor, steps: tuple[int, int], *, dtype: torch.dtype, group: int | None = None
    ) -> torch.Tensor:
        """The tokens of some steps, [group, steps, batch * heads / group, chunk, dim], contiguous.

        Args:
            x: [batch, seqlen, heads, dim], any strides.
            steps: the first one and the one after the last.
            dtype: of the result.
            group: as how many heads' group x is seen; by default that of value heads.
        """
        begin, end = (step * self.sizes.chunk for step in steps)
        group = self.sizes.group if group is None else group
        if self.tokens is not None and self.filled is not None:
            part = x[0].index_select(0, self.tokens[begin:end])
            part = part.masked_fill_(~self.filled[begin:end, None, None], 0)[None]
        else:
            part = x[:, begin:end]
            if part.shape[1] < end - begin:
                filled = part.new_zeros(part.shape[0], end - begin, *part.shape[2:])
                filled[:, : part.shape[1]] = part
                part = filled
        parts = part.unflatten(2, (-1, group)).unflatten(1, (-1, self.sizes.chunk))
        ordered = parts.permute(4, 1, 0, 3, 2, 5)
        return torch.empty(ordered.shape, dtype=dtype, device=x.device).copy_(ordered).flatten(2, 3)

    def put(self, out: torch.Tensor, steps: tuple[int, int], values: torch.Tensor) -> None:
        """Writes values laid out as by `take` to their tokens of `out` [batch, seqlen, heads, dim]."""
        begin, end = (step * self.sizes.chunk for step in steps)
        parts = values.unflatten(2, (self.rows, -1)).permute(2, 1, 4, 3, 0, 5)
        if self.tokens is not None and self.filled is not None:
            filled = self.filled[begin:end]
            flat = parts.flatten(3, 4).flatten(1, 2)[0]
            out[0].index_copy_(0, self.tokens[begin:end][filled], flat[filled].to(out.dtype))
        elif end <= self.seqlen:
            out[:, begin:end].unflatten(2, (-1, values.shape[0])).unflatten(1, (-1, self.sizes.chunk)).copy_(parts)
        else:
            out[:, begin:] = parts.flatten(3, 4).flatten(1, 2)[:, : self.seqlen - begin]

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for `put`, contiguous; zero where `put` may leave tokens out."""
        made = torch.zeros if self.tokens is not None else torch.empty
        return made(like.shape, dtype=like.dtype, device=like.device)
