"""SSD on a CPU: chunks of tokens at a time, in batched matrix products, with a backward of its own.

With L the inclusive sum of a = dt A within a chunk of Q tokens, S the state that enters it and G the gradient of the
state that leaves it (one head; B and C are those of its group):

    E_ts = exp(L_t - L_s) for s <= t, else 0          M = E o (C B^T)
    y    = M (dt x) + exp(L) o (C S^T)                 S' = exp(L_Q) S + (exp(L_Q - L) dt x)^T B
    u    = M^T dy + exp(L_Q - L) o (B G^T)             dx = dt u
    dC   = sum of heads (E o dy (dt x)^T) B + (exp(L) dy) S         and dB likewise

(Dao and Gu 2024, section 6.) The gradient of a_j is the sum of everything whose exponent holds it: of the pairs
s < j <= t, of what comes from S to t >= j, of what goes from s < j to G, and of exp(L_Q) <G, S>. It is summed in that
form; the shorter dy.y - dt x.u cancels where decay is strong.

L and all its differences are in float64, and so are the sums over tokens. The rest is in float32, or float64 if x is.
S and G pass from chunk to chunk; everything else is done for a block of chunks at once, which is never very large, so
that memory beyond the results hardly grows with the sequence. The forward keeps nothing for the backward, which first
makes the states that enter the blocks, and from those the others, again. Where a group has several heads its B and C
take part once, in products with all of its heads side by side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from automodel_kernels.ssd.chunk_block import Block, Inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChunkedGradients", "ssd_backward_torch", "ssd_forward_torch"]


@dataclass(frozen=True, kw_only=True)
class ChunkedGradients:
    """Gradients, each in the shape and dtype of its input; None for an input that is absent."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None


@torch.no_grad()
def ssd_forward_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward, with the arguments of `mamba_chunk_scan_combined`, without its checks and without autograd.

    Returns:
        The output, as x, and the states after each sequence, [sequences, heads, head_dim, state_dim] in the dtype of
        the computation.
    """
    inputs = Inputs(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )
    layout = inputs.layout
    out = torch.empty(len(inputs.x), inputs.heads * inputs.head_dim, dtype=x.dtype)
    final_states = inputs.states(initial_states)
    state = final_states.index_select(0, layout.sequences)
    for chunks, steps in layout.blocks(most_chunks=inputs.most_chunks):
        block = Block(inputs, chunks, steps)
        entering = block.enter(state, block.groups("x out", block.x, block.dt * block.to_end))
        mixing = block.decays().mul_(block.products())
        outside = block.matmul("outside", block.c, entering.mT)
        y = block.outputs("y", mixing, block.heads("x in", block.x, block.dt), outside)
        if inputs.z is not None:
            gate = block.tokens("z", inputs.z)
            y.mul_(gate).mul_(gate.sigmoid_())
        layout.scatter(y, chunks, out=out)
    final_states[layout.sequences] = state
    return out.view(x.shape), final_states


class _Gradients:
    """The gradients as they come together: tokens in one dimension."""

    def __init__(self, inputs: Inputs) -> None:
        self.x, self.b, self.c = (_new_like(each) for each in (inputs.x, inputs.b, inputs.c))
        self.z = None if inputs.z is None else _new_like(inputs.z)
        self.dt, self.a = _new_like(inputs.dt), _new_like(inputs.dt)
        self.d = torch.zeros(inputs.heads, inputs.head_dim, dtype=torch.float64)


def _new_like(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype)


@torch.no_grad()
def ssd_backward_torch(
    dout: torch.Tensor,
    dfinal_states: torch.Tensor | None,
    saved: Sequence[torch.Tensor | None],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> ChunkedGradients:
    """The backward of `ssd_forward_torch`, with the same inputs.

    Args:
        dout: gradient of the output, as x.
        dfinal_states: gradient of the final states, [sequences, heads, head_dim, state_dim]; None for zeros.
        saved: not read, since the forward keeps nothing; the kernels' backward, which has the same arguments, reads it.
    """
    inputs = Inputs(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )
    layout, sums = inputs.layout, _Gradients(inputs)
    dstates = inputs.states(dfinal_states)
    dstate = dstates.index_select(0, layout.sequences)
    blocks = list(layout.blocks(most_chunks=inputs.most_chunks))
    entered = _entered_states(inputs, blocks, initial_states)
    douts = dout.flatten(2).flatten(0, 1)
    for (chunks, steps), state in zip(reversed(blocks), reversed(entered), strict=True):
        _backward_block(Block(inputs, chunks, steps), douts, state, dstate, sums)
    dstates[layout.sequences] = dstate
    draw = (sums.dt + inputs.A * sums.a) * inputs.dt_slope()
    return ChunkedGradients(
        x=sums.x.view(x.shape),
        dt=draw.to(dt.dtype).view(dt.shape),
        A=(inputs.dt * sums.a).sum(0).to(A.dtype),
        B=sums.b.view(B.shape),
        C=sums.c.view(C.shape),
        D=None if D is None else (sums.d if D.ndim == 2 else sums.d.sum(1)).to(D.dtype),
        z=None if sums.z is None else sums.z.view(x.shape),
        dt_bias=None if dt_bias is None else draw.sum(0).to(dt_bias.dtype),
        initial_states=None if initial_states is None else dstates.to(initial_states.dtype),
    )


def _entered_states(
    inputs: Inputs, blocks: Sequence[tuple[slice, tuple[int, ...]]], initial_states: torch.Tensor | None
) -> list[torch.Tensor]:
    """The states that enter each block, of the sequences that reach it."""
    entered = [inputs.states(initial_states).index_select(0, inputs.layout.sequences)] if blocks else []
    for (chunks, steps), (_, next_steps) in itertools.pairwise(blocks):
        block, state = Block(inputs, chunks, steps), entered[-1].clone()
        block.enter(state, block.groups("x out", block.x, block.dt * block.to_end))
        entered.append(state[: next_steps[1]])
    return entered


def _backward_block(
    block: Block, douts: torch.Tensor, state: torch.Tensor, dstate: torch.Tensor, sums: _Gradients
) -> None:
    inputs, layout, chunks = block.inputs, block.inputs.layout, block.chunks
    decays, products = block.decays(), block.products()
    mixing = torch.mul(decays, products, out=block.take("mixing", *decays.shape[1:]))
    x_in = block.heads("x in", block.x, block.dt)
    x_out = block.groups("x out", block.x, block.dt * block.to_end)
    entering = block.enter(state, x_out)
    dout = block.tokens("dout", douts)
    if inputs.z is not None and sums.z is not None:
        y = block.outputs("y", mixing, x_in, block.matmul("outside", block.c, entering.mT))
        gate = block.tokens("z", inputs.z)
        share = gate.sigmoid()
        layout.scatter(y.mul_(dout).mul_(share * (1 + gate * (1 - share))), chunks, out=sums.z)
        dout.mul_(gate.mul_(share))
    dy, dy_out = block.heads("dy", dout, None), block.groups("dy out", dout, block.since_start)
    leaving = block.leave(dstate, dy_out)

    reached = block.matmul("reached", block.b, leaving.mT)
    u = block.together("u", block.matmul("inside", mixing.flatten(0, 2).mT, dy), reached, block.to_end)
    product = block.take("product", *u.shape[1:])
    layout.scatter(torch.mul(u, block.x, out=product).sum(3), chunks, out=sums.dt)
    dx = u.mul_(block.dt.transpose(1, 2)[..., None])
    if inputs.d is not None:
        dx.addcmul_(dout, inputs.d)
        sums.d += torch.mul(dout, block.x, out=product).sum((0, 1))
    layout.scatter(dx, chunks, out=sums.x)

    dpairs = block.matmul("mixing", dy, x_in.mT).view(decays.shape).mul_(decays)
    dproducts = dpairs.sum(2).flatten(0, 1)
    through = block.matmul("through", dy, entering.view(len(dy), -1, inputs.state_dim)).view(*decays.shape[:4], -1)
    through.mul_(block.since_start.view(*decays.shape[:4], 1))
    dc = block.matmul("dc", dproducts, block.b).add_(through.sum(2).flatten(0, 1))
    db = block.matmul("db", dproducts.mT, block.c).baddbmm_(x_out, leaving)
    for made, out in ((db, sums.b), (dc, sums.c)):
        layout.scatter(
            made.view(block.count, inputs.groups, inputs.chunk, -1).transpose(1, 2).flatten(2), chunks, out=out
        )

    da = _pair_sums(block, dpairs.mul_(products).flatten(1, 2))
    from_start = through.mul_(block.c.view(block.count, inputs.groups, 1, inputs.chunk, -1)).sum(4)
    da += _from_here(from_start.flatten(1, 2).to(torch.float64))
    da[..., 1:] += block.head_sums(x_out, reached).cumsum(2)[..., :-1]
    crossing = torch.mul(leaving, entering, out=inputs.scratch.take("made", *leaving.shape))
    da += crossing.view(block.count, inputs.heads, 1, -1).sum(3) * block.total[..., 0]
    layout.scatter(da.transpose(1, 2), chunks, out=sums.a)


def _pair_sums(block: Block, pairs: torch.Tensor) -> torch.Tensor:
    """For each j the sum of the pairs s < j <= t: [k, H, Q, Q] to [k, H, Q], float64."""
    # Row sums less column sums: what lies on one side of j cancels, exactly but for float64's rounding, and so does the
    # diagonal.
    wide = block.inputs.scratch.take("differences", *pairs.shape, dtype=torch.float64).copy_(pairs)
    return _from_here(wide.sum(-1) - wide.sum(-2))


def _from_here(values: torch.Tensor) -> torch.Tensor:
    """The sum of each value and those after it along the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)
