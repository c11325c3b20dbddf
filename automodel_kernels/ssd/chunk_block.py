"""Blocks of chunks on a CPU: inputs laid out, a block's tensors in the shapes of matrix products, and its states."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from automodel_kernels.ssd.chunk_layout import lay_out

if TYPE_CHECKING:
    from automodel_kernels.ssd.chunk_layout import ChunkLayout

__all__ = ["Block", "Inputs"]

# Lengths that chunks may have. Short ones are for short documents, which would fill long ones with padding.
CHUNKS = (64, 32, 16, 8, 4)

# Elements of x in a block: 2 MiB in float32. Forward and backward have up to sixteen tensors of about that size.
BLOCK_ELEMENTS = 1 << 19


def _token_cost(chunk: int, head_dim: int, state_dim: int) -> float:
    """What a token of a head costs forward and backward, in multiply-adds; times measured on a CPU are within 20 %."""
    products = 8 * head_dim * state_dim + 4 * chunk * head_dim
    # An element-wise pass takes as long as about ten multiply-adds of a product: over tokens, states and pairs.
    passed = 25 * head_dim + 12 * head_dim * state_dim / chunk + 10 * chunk
    return products + 10 * passed


class Scratch:
    """Memory for a block's tensors by name, used again by the next block: fresh memory costs page faults."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A contiguous tensor with any values; it is valid until the name is taken again.

        Args:
            name: stands for one dtype.
            shape: of the tensor.
            dtype: that of the computation by default.
        """
        memory = self._memory.get(name)
        if memory is not None and memory.shape == shape:
            return memory
        size = math.prod(shape)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = torch.empty(shape, dtype=dtype or self._dtype)
            return memory
        return memory.flatten()[:size].view(shape)


class Inputs:
    """The inputs with tokens in one dimension, their layout in chunks, and their sizes.

    Attributes:
        work: dtype of the computation.
        dt: [tokens, H] float64, after bias, softplus and clamp.
        decay: [chunks, Q, H] float64: L.
    """

    def __init__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
    ) -> None:
        batch, seqlen, self.heads, self.head_dim = x.shape
        self.groups, self.state_dim = B.shape[2:]
        self.num_seqs = batch if cu_seqlens is None else len(cu_seqlens) - 1
        self.work = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.x, self.b, self.c = x.flatten(2).flatten(0, 1), B.flatten(2).flatten(0, 1), C.flatten(2).flatten(0, 1)
        self.z = None if z is None else z.flatten(2).flatten(0, 1)
        self.d = None if D is None else (D if D.ndim == 2 else D[:, None]).to(self.work)
        self.raw_dt = dt.flatten(0, 1).to(torch.float64)
        if dt_bias is not None:
            self.raw_dt = self.raw_dt + dt_bias
        self.soft_dt = functional.softplus(self.raw_dt) if dt_softplus else self.raw_dt
        self.dt_softplus, self.dt_limit = dt_softplus, dt_limit
        self.dt = self.soft_dt.clamp(*dt_limit)
        self.A = A.to(torch.float64)
        self.layout: ChunkLayout = lay_out(
            batch=batch,
            seqlen=seqlen,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            costs={each: _token_cost(each, self.head_dim, self.state_dim) for each in CHUNKS},
        )
        self.chunk = self.layout.tokens.shape[1]
        self.scratch = Scratch(self.work)

    @property
    def most_chunks(self) -> int:
        """Chunks of a block."""
        # A chunk has a state; of short chunks the states are what takes memory.
        return max(1, BLOCK_ELEMENTS // (max(self.chunk, self.state_dim // 2) * self.heads * self.head_dim))

    def states(self, given: torch.Tensor | None) -> torch.Tensor:
        """States or their gradients, [S, H, P, N] in the dtype of the computation: a copy, or zeros."""
        if given is None:
            shape = (self.num_seqs, self.heads, self.head_dim, self.state_dim)
            return torch.zeros(shape, dtype=self.work, device=self.x.device)
        return given.to(self.work, copy=True).contiguous()

    def dt_slope(self) -> torch.Tensor:
        """[tokens, H] float64: the derivative of dt by its raw value."""
        low, high = self.dt_limit
        inside = ((self.soft_dt >= low) & (self.soft_dt <= high)).to(torch.float64)
        return inside.mul_(self.raw_dt.sigmoid()) if self.dt_softplus else inside


class Block:
    """Some chunks, k of them, and what forward and backward both need of them.

    A tensor of the tokens has one of three forms: `tokens` [k, Q, H, P] as in memory, `heads` [k * H, Q, P] and
    `groups` [k * G, Q, H / G * P] as matrices. Factors are [k, H, Q].

    Attributes:
        dt, since_start, to_end: factors dt_s, exp(L_t) and exp(L_Q - L_s).
        total: [k, H, 1, 1], exp(L_Q).
    """

    def __init__(self, inputs: Inputs, chunks: slice, steps: tuple[int, ...]) -> None:
        self.inputs, self.chunks, self.count = inputs, chunks, chunks.stop - chunks.start
        self.sizes = [end - begin for begin, end in itertools.pairwise(steps)]
        fresh = inputs.layout.fresh
        self.fresh = None if fresh is None else fresh[chunks, None, None, None]
        dt = self._gather("dt", inputs.dt).transpose(1, 2).contiguous()
        self._sums = (dt * inputs.A[:, None]).cumsum(2)
        work, ends = inputs.work, self._sums[:, :, -1:]
        self.dt = dt.to(work)
        self.since_start = self._sums.exp().to(work)
        self.to_end = (ends - self._sums).exp_().to(work)
        self.total = ends.exp().to(work).unsqueeze(3)

    @cached_property
    def x(self) -> torch.Tensor:
        """x as tokens."""
        return self.tokens("x", self.inputs.x)

    @cached_property
    def b(self) -> torch.Tensor:
        """B, [k * G, Q, N]."""
        return self._group_rows("b", self.inputs.b)

    @cached_property
    def c(self) -> torch.Tensor:
        """C, [k * G, Q, N]."""
        return self._group_rows("c", self.inputs.c)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Memory of that name, [k, *shape]."""
        return self.inputs.scratch.take(name, self.count, *shape)

    def tokens(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of a tensor of x's width, in the dtype of the computation."""
        inputs = self.inputs
        return self._in_work(name, self._gather(name, rows)).view(-1, inputs.chunk, inputs.heads, inputs.head_dim)

    def heads(self, name: str, tokens: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Tokens, times factors if there are any, by head."""
        inputs, rows = self.inputs, tokens.transpose(1, 2)
        made = self.take(name, inputs.heads, inputs.chunk, inputs.head_dim)
        if factors is None:
            made.copy_(rows)
        else:
            torch.mul(rows, factors[..., None], out=made)
        return made.flatten(0, 1)

    def groups(self, name: str, tokens: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Tokens times factors by group."""
        inputs = self.inputs
        made = self.take(name, inputs.groups, inputs.chunk, inputs.heads // inputs.groups, inputs.head_dim)
        shaped = tokens.view(self.count, inputs.chunk, inputs.groups, -1, inputs.head_dim)
        torch.mul(shaped.transpose(1, 2), self._by_group(factors), out=made)
        return made.flatten(0, 1).flatten(2)

    def together(self, name: str, heads: torch.Tensor, groups: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Tokens: by head, plus factors times by group."""
        inputs = self.inputs
        per_group = inputs.heads // inputs.groups
        left = heads.view(self.count, inputs.groups, per_group, inputs.chunk, inputs.head_dim).permute(0, 3, 1, 2, 4)
        right = groups.view(self.count, inputs.groups, inputs.chunk, per_group, inputs.head_dim).transpose(1, 2)
        made = self.take(name, inputs.chunk, inputs.groups, per_group, inputs.head_dim)
        torch.addcmul(left, right, self._by_group(factors).transpose(1, 2), out=made)
        return made.flatten(2, 3)

    def head_sums(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """[k, H, Q] float64: the sums along P of the product of two by group."""
        inputs = self.inputs
        product = torch.mul(left, right, out=self.inputs.scratch.take("product", *left.shape))
        sums = product.view(self.count, inputs.groups, inputs.chunk, -1, inputs.head_dim).sum(4)
        return sums.transpose(2, 3).flatten(1, 2).to(torch.float64)

    def matmul(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product of two batches of matrices."""
        out = self.inputs.scratch.take(name, left.shape[0], left.shape[1], right.shape[2])
        return torch.bmm(left, right, out=out)

    def decays(self) -> torch.Tensor:
        """E, [k, G, H / G, Q, Q]."""
        inputs = self.inputs
        shape = (self.count, inputs.heads, inputs.chunk, inputs.chunk)
        differences = inputs.scratch.take("differences", *shape, dtype=torch.float64)
        torch.sub(self._sums[..., :, None], self._sums[..., None, :], out=differences)
        made = self.take("decays", *shape[1:]).copy_(differences)
        return made.exp_().tril_().view(self.count, inputs.groups, -1, *shape[2:])

    def products(self) -> torch.Tensor:
        """C B^T, [k, G, 1, Q, Q]."""
        inputs = self.inputs
        made = self.matmul("products", self.c, self.b.mT)
        return made.view(self.count, inputs.groups, 1, inputs.chunk, inputs.chunk)

    def enter(self, state: torch.Tensor, x_out: torch.Tensor) -> torch.Tensor:
        """The states that enter the chunks, [k * G, H / G * P, N].

        Args:
            state: [S', H, P, N], those that enter the block; overwritten by those that leave it.
            x_out: x times dt times to_end, by group.
        """
        made, entering = self.matmul("made", x_out.mT, self.b), self.take("entering", *self._state_shape)
        self._pass(state, entering, made.view(entering.shape), backwards=False)
        return entering.view(made.shape)

    def leave(self, gradient: torch.Tensor, dy_out: torch.Tensor) -> torch.Tensor:
        """The gradients of the states that leave the chunks, [k * G, H / G * P, N].

        Args:
            gradient: [S', H, P, N], of the states that leave the block; overwritten by that of those that enter it.
            dy_out: dy times since_start, by group.
        """
        made, leaving = self.matmul("made", dy_out.mT, self.c), self.take("leaving", *self._state_shape)
        self._pass(gradient, leaving, made.view(leaving.shape), backwards=True)
        return leaving.view(made.shape)

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        return self.inputs.heads, self.inputs.head_dim, self.inputs.state_dim

    def _pass(self, carry: torch.Tensor, passing: torch.Tensor, made: torch.Tensor, *, backwards: bool) -> None:
        """From step to step: passing = carry, carry = total * passing + made; fresh chunks pass nothing on."""
        tensors = (passing, self.total, made)
        fresh = [None] * len(self.sizes) if self.fresh is None else self.fresh.split(self.sizes)
        parts = list(zip(*(each.split(self.sizes) for each in tensors), fresh, strict=True))
        if backwards:
            parts.reverse()
        carried = False
        for (here, total, added, drops), following in zip(parts, [*parts[1:], None], strict=True):
            if not carried:
                here.copy_(carry[: len(here)])
            if drops is not None and not backwards:
                here.masked_fill_(drops, 0)
            # A step with as many sequences needs no copy.
            carried = following is not None and len(following[0]) == len(here)
            target = following[0] if following is not None and carried else carry[: len(here)]
            torch.addcmul(added, here, total, out=target)
            if drops is not None and backwards:
                target.masked_fill_(drops, 0)

    def outputs(self, name: str, mixing: torch.Tensor, x_in: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        """y before the gate, tokens.

        Args:
            name: of its memory.
            mixing: M, [k, G, H / G, Q, Q].
            x_in: x times dt, by head.
            outside: C S^T, by group.
        """
        inside = self.matmul("inside", mixing.flatten(0, 2), x_in)
        y = self.together(name, inside, outside, self.since_start)
        return y if self.inputs.d is None else y.addcmul_(self.x, self.inputs.d)

    def _by_group(self, factors: torch.Tensor) -> torch.Tensor:
        """[k, H, Q] as [k, G, Q, H / G, 1]."""
        return factors.view(self.count, self.inputs.groups, -1, self.inputs.chunk).transpose(2, 3).unsqueeze(4)

    def _gather(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        shape = (self.count, inputs.chunk, rows.shape[1])
        out = inputs.scratch.take(f"{name} {rows.dtype}", *shape, dtype=rows.dtype)
        return inputs.layout.gather(rows, self.chunks, out=out)

    def _in_work(self, name: str, found: torch.Tensor) -> torch.Tensor:
        return found if found.dtype == self.inputs.work else self.take(name, *found.shape[1:]).copy_(found)

    def _group_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        inputs, found = self.inputs, self._in_work(name, self._gather(name, rows))
        shaped = found.view(self.count, inputs.chunk, inputs.groups, inputs.state_dim)
        return shaped.transpose(1, 2).contiguous().flatten(0, 1)
