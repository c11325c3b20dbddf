"""The gated delta rule in chunks, on plain torch: the path of CPUs, forward and backward, without autograd.

Per value head and chunk, with the state S at its start, c_t the sum of g since its start, E_ts = exp(c_t - c_s) for
s <= t, e_t = exp(c_t), f_s = exp(c_Q - c_s), and A the strict lower triangle of E_ts (k_t . k_s):

    u   = (I + A diag(beta))^-1 (v - e k S)      the error that each token corrects, and d = beta u
    o_t = scale (e_t S^T q_t + sum_{s<=t} E_ts (q_t . k_s) d_s)
    S'  = e_Q S + sum_s f_s k_s d_s^T

Backward, with do scaled, G the gradient of S', and X = (I + A diag(beta))^-1 saved:

    dd  = sum_{t>=s} E_ts (q_t . k_s) do_t + f k G      dv = X^T (beta dd)      dS = e_Q G + (e q)^T do - (e k)^T dv
    dA' = -dv u^T, the gradient of A diag(beta)          dbeta_s = u_s . dd_s + sum_t A_ts dA'_ts

The gate's gradient is the direct sum over the pairs s < j <= t of E_ts times the gradient that E_ts receives, plus the
border terms of e, f and e_Q: nothing large cancels. Sums of g are in float64, everything else in fp32, or in float64
where an input is. Only u, X and a state for each segment of chunks are kept for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automodel_kernels.gdn.gates import Gates
from automodel_kernels.gdn.layout import Layout, Sizes
from automodel_kernels.gdn.reference import accumulator_dtype
from automodel_kernels.gdn.segment import form_segment, invert_unit_lower, replay_states, run_states
from automodel_kernels.gdn.segment_gradients import add_state_gradients, norm_gradient, pair_gradients, run_back

__all__ = ["ChunkedForward", "ChunkedGradients", "Gates", "gdn_backward_torch", "gdn_forward_torch", "saved_shapes"]

AS_GIVEN = Gates()


@dataclass(frozen=True, kw_only=True)
class ChunkedForward:
    """What the forward computes.

    Attributes:
        o: [batch, seqlen, value_heads, value_dim] in v's dtype.
        final_state: [sequences, value_heads, key_dim, value_dim], float32, or float64 if an input is.
        saved: for the backward, of the shapes that `saved_shapes` says.
    """

    o: torch.Tensor
    final_state: torch.Tensor
    saved: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class ChunkedGradients:
    """The gradients, each in its input's shape and dtype; None where the input was None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


def saved_shapes(
    q: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None, chunk_size: int
) -> tuple[tuple[int, ...], ...]:
    """The shapes of `ChunkedForward.saved`, from shapes alone; with cu_seqlens they hold room that may stay unused.

    Raises nothing and reads no data, so that fake tensors do. The dtype is the final state's.
    """
    sizes = Sizes.of(q, v, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    blocks = (sizes.group, sizes.most_steps, q.shape[0] * q.shape[2])
    segments = -(-sizes.most_steps // sizes.segment)
    return (
        (*blocks, sizes.chunk, v.shape[3]),
        (*blocks, sizes.chunk, sizes.chunk),
        (segments, blocks[0], blocks[2], q.shape[3], v.shape[3]),
    )


@torch.no_grad()
def gdn_forward_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    gates: Gates = AS_GIVEN,
) -> ChunkedForward:
    """The gated delta rule; arguments as of `chunk_gated_delta_rule`, which has checked them.

    Args:
        q: [batch, seqlen, heads, key_dim], like all of these of any floating dtype and strides.
        k: [batch, seqlen, heads, key_dim].
        v: [batch, seqlen, value_heads, value_dim].
        g: [batch, seqlen, value_heads].
        beta: [batch, seqlen, value_heads].
        scale: of the outputs.
        initial_state: [sequences, value_heads, key_dim, value_dim], or None for zero.
        l2norm: whether q and k are normalised.
        cu_seqlens: [sequences + 1] integers; batch is 1 then.
        chunk_size: the most tokens that a chunk may have.
        gates: how decay and beta are made of g and beta.
    """
    dtype = accumulator_dtype(q, k, v, g, beta)
    layout = Layout.of(q, v, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    decay, strength = gates.apply(g, beta, dtype=dtype)
    shapes = saved_shapes(q, v, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    errors, inverses, states = saved = tuple(v.new_empty(shape, dtype=dtype) for shape in shapes)
    o, heads = layout.empty(v), q.shape[2]
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # An empty sequence ends as it began.
    final = v.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    if initial_state is not None:
        final.copy_(initial_state)
    initial = None if initial_state is None else _grouped_states(final.clone(), heads)
    finals = _grouped_states(final, heads)
    state = states.new_zeros(states.shape[1:])
    for number, steps in enumerate(layout.segments()):
        part = form_segment(layout, steps, q, k, decay, strength, l2norm=l2norm)
        inverse = inverses[:, slice(*steps)]
        system = (part.pairs * part.products).mul_(part.beta.mT)
        for each, out in zip(system, inverse, strict=True):
            invert_unit_lower(each.flatten(0, 1), out.flatten(0, 1))
        error = errors[:, slice(*steps)]
        value = layout.take(v, steps, dtype=dtype)
        carried = run_states(layout, steps, part, value, inverse, error, state, initial, finals)
        states[number] = state
        state = carried[:, -1]
        # What follows is for all steps at once.
        weights = part.pairs.mul_(torch.bmm(part.q.flatten(0, 1), part.k.flatten(0, 1).mT).view_as(part.products))
        for r, out in enumerate(value):
            torch.bmm(part.q.flatten(0, 1), carried[r, :-1].flatten(0, 1), out=out.flatten(0, 1))
        value.mul_(part.from_start)
        corrections = part.beta * error
        for r, out in enumerate(value):
            out.flatten(0, 1).baddbmm_(weights[r].flatten(0, 1), corrections[r].flatten(0, 1))
        layout.put(o, steps, value.mul_(scale))
    return ChunkedForward(o=o, final_state=final, saved=saved)


@torch.no_grad()
def gdn_backward_torch(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    gates: Gates = AS_GIVEN,
) -> ChunkedGradients:
    """The gradients of `gdn_forward_torch`, of whose arguments only v's values are not read.

    Args:
        do: the gradient of o, any strides.
        dfinal: the gradient of the final state, or None for zero.
        saved: what the forward saved; not changed.
        q, k, v, g, beta, scale, initial_state, l2norm, cu_seqlens, chunk_size, gates: as the forward had them.
    """
    dtype = accumulator_dtype(q, k, v, g, beta)
    layout = Layout.of(q, v, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    decay, strength = gates.apply(g, beta, dtype=dtype)
    errors, inverses, states = saved
    heads, sequences = q.shape[2], v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dinitial = v.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    if dfinal is not None:
        dinitial.copy_(dfinal)
    dfinals = None if dfinal is None else _grouped_states(dfinal.to(dtype).contiguous(), heads)
    dinitials = _grouped_states(dinitial, heads)
    initial = None if initial_state is None else _grouped_states(initial_state.to(dtype).contiguous(), heads)
    dq, dk, dv, ddecay, dstrength = (layout.empty(each) for each in (q, k, v, strength, strength))
    dstate = states.new_zeros(states.shape[1:])
    for number, steps in reversed(list(enumerate(layout.segments()))):
        part = form_segment(layout, steps, q, k, decay, strength, l2norm=l2norm)
        error, inverse = errors[:, slice(*steps)], inverses[:, slice(*steps)]
        correction = part.beta * error
        ending = correction * part.to_end
        carried = replay_states(layout, steps, part, ending, states[number], initial)
        dout = layout.take(do, steps, dtype=dtype).mul_(scale)
        scores = torch.bmm(part.q.flatten(0, 1), part.k.flatten(0, 1).mT).view_as(part.products)
        flow = run_back(layout, steps, part, inverse, dout, scores, dstate, dfinals, dinitials)
        dstate = flow.dstates[:, 0]
        found = pair_gradients(part, scores, dout, correction, error, flow)
        layout.put(dv, steps, flow.dvalue)
        add_state_gradients(found, part, carried, ending, flow)
        layout.put(ddecay[..., None], steps, found.decay[..., None])
        layout.put(dstrength[..., None], steps, found.beta[..., None])
        layout.put(dq, steps, norm_gradient(found.q, part.q, part.q_norm)[None])
        layout.put(dk, steps, norm_gradient(found.k, part.k, part.k_norm)[None])
    dg, dbeta, dA_log, ddt_bias = gates.gradients(g, beta, ddecay, dstrength)
    return ChunkedGradients(
        q=dq,
        k=dk,
        v=dv,
        g=dg,
        beta=dbeta,
        initial_state=None if initial_state is None else dinitial.to(initial_state.dtype),
        A_log=dA_log,
        dt_bias=ddt_bias,
    )


def _grouped_states(states: torch.Tensor, heads: int) -> torch.Tensor:
    """A view of states [sequences, value_heads, key_dim, value_dim] as [G, sequences, heads, key_dim, value_dim]."""
    sequences, value_heads, *dims = states.shape
    return states.view(sequences, heads, value_heads // heads, *dims).permute(2, 0, 1, 3, 4)
