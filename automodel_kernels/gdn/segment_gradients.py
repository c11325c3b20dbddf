"""The backward of the torch path for some chunks at once; formulas in `chunked`, layout and letters as in `segment`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from automodel_kernels.gdn.segment import begin_states

if TYPE_CHECKING:
    from automodel_kernels.gdn.layout import Layout
    from automodel_kernels.gdn.segment import Segment

__all__ = ["Flow", "Found", "add_state_gradients", "norm_gradient", "pair_gradients", "run_back"]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What runs from the last chunk to the first.

    Attributes:
        reading: e times the scaled gradient of o, [G, steps, N, chunk, value_dim].
        dcorrection: the gradient of d = beta u, of the same shape.
        dvalue: the gradient of v, of the same shape.
        ahead: k times the gradient of the state after the chunk, of the same shape.
        dstates: the gradients of the states, that of a step's own state at its number and of the next one's behind.
    """

    reading: torch.Tensor
    dcorrection: torch.Tensor
    dvalue: torch.Tensor
    ahead: torch.Tensor
    dstates: torch.Tensor


@dataclass(kw_only=True)
class Found:
    """Gradients of a segment: q and k [steps, N, chunk, key_dim], beta and the log decay [G, steps, N, chunk]."""

    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


def run_back(
    layout: Layout,
    steps: tuple[int, int],
    part: Segment,
    inverse: torch.Tensor,
    dout: torch.Tensor,
    scores: torch.Tensor,
    dstate: torch.Tensor,
    dfinals: torch.Tensor | None,
    dinitials: torch.Tensor,
) -> Flow:
    """The chunks from the last to the first.

    Args:
        dout: the gradient of o, scaled.
        scores: q k^T.
        dstate: the gradient of the state after the last step, from later segments.
        dfinals: the gradients of the final states.
        dinitials: is filled with those of the initial states.
    """
    group, count = dout.shape[:2]
    dcorrection, dvalue, ahead = (torch.empty_like(dout) for _ in range(3))
    dstates = dout.new_empty(group, count + 1, *dstate.shape[1:])
    dstates[:, count] = dstate
    weights, reading = part.pairs * scores, dout * part.from_start
    for r in range(group):
        torch.bmm(weights[r].flatten(0, 1).mT, dout[r].flatten(0, 1), out=dcorrection[r].flatten(0, 1))
        torch.bmm(part.q.flatten(0, 1).mT, reading[r].flatten(0, 1), out=dstates[r, :-1].flatten(0, 1))
    passing = torch.empty_like(dout[:, 0])
    states, corrections, values, kept, beta, from_start, to_end, whole = (
        each.unbind(1)
        for each in (dstates, dcorrection, dvalue, ahead, part.beta, part.from_start, part.to_end, part.whole)
    )
    head_states, head_kept, head_inverses, head_values = (
        [head.unbind(0) for head in each] for each in (dstates, ahead, inverse.mT, dvalue)
    )
    heads, keys = list(enumerate(passing)), part.k.unbind(0)
    for c in reversed(range(count)):
        step, key = steps[0] + c, keys[c]
        begin_states(states[c + 1], layout.ends.get(step), dfinals)
        for r, _ in heads:
            torch.bmm(key, head_states[r][c + 1], out=head_kept[r][c])
        corrections[c].addcmul_(kept[c], to_end[c])
        torch.mul(corrections[c], beta[c], out=passing)
        for r, each in heads:
            torch.bmm(head_inverses[r][c], each, out=head_values[r][c])
        torch.mul(values[c], from_start[c], out=passing)
        states[c].addcmul_(states[c + 1], whole[c])
        for r, each in heads:
            head_states[r][c].baddbmm_(key.mT, each, alpha=-1)
        if step in layout.begins:
            target = dinitials[:, layout.begins[step]]
            target.copy_(states[c].view(target.shape))
    return Flow(reading=reading, dcorrection=dcorrection, dvalue=dvalue, ahead=ahead, dstates=dstates)


def pair_gradients(
    part: Segment,
    scores: torch.Tensor,
    dout: torch.Tensor,
    correction: torch.Tensor,
    error: torch.Tensor,
    flow: Flow,
) -> Found:
    """The gradients that run through pairs of a chunk's tokens; `part.pairs` loses its diagonal.

    Args:
        scores: q k^T.
        dout: the gradient of o, scaled.
        correction: beta u.
        error: u.
        flow: of `run_back`.
    """
    dpairs, dsystem = torch.empty_like(part.pairs), torch.empty_like(part.pairs)
    for r in range(len(dout)):
        torch.bmm(dout[r].flatten(0, 1), correction[r].flatten(0, 1).mT, out=dpairs[r].flatten(0, 1))
        torch.bmm(flow.dvalue[r].flatten(0, 1), error[r].flatten(0, 1).mT, out=dsystem[r].flatten(0, 1))
    dpairs.mul_(part.pairs)
    part.pairs.diagonal(dim1=-2, dim2=-1).zero_()
    dsystem.mul_(part.pairs)
    # From here on both hold E times a gradient; that of A diag(beta) has the other sign.
    dscores = dpairs.sum(0).flatten(0, 1)
    dproducts = (dsystem * part.beta.mT).sum(0).flatten(0, 1)
    dsystem.mul_(part.products)
    dbeta = torch.linalg.vecdot(error, flow.dcorrection).sub_(dsystem.sum(-2))
    crossing = dpairs.mul_(scores).addcmul_(dsystem, part.beta.mT, value=-1)
    query, key = part.q.flatten(0, 1), part.k.flatten(0, 1)
    dquery = torch.bmm(dscores, key)
    dkey = torch.bmm(dscores.mT, query).baddbmm_(dproducts.mT + dproducts, key, alpha=-1)
    return Found(q=dquery.view_as(part.q), k=dkey.view_as(part.k), beta=dbeta, decay=_sum_across(crossing))


def _sum_across(crossing: torch.Tensor) -> torch.Tensor:
    """For each token j the sum over all s < j <= t of crossing[..., t, s]; [..., chunk, chunk] -> [..., chunk]."""
    size = crossing.shape[-1]
    below = crossing.new_ones(size, size).tril_(-1)
    upto = crossing.cumsum(-1).mul_(below).sum(-2)
    return functional.pad(upto[..., :-1], (1, 0))


def add_state_gradients(
    found: Found,
    part: Segment,
    carried: torch.Tensor,
    ending: torch.Tensor,
    flow: Flow,
) -> None:
    """Adds the gradients that run through the states.

    Args:
        found: what is added to.
        carried: the states before each step.
        ending: f beta u.
        flow: of `run_back`; its `dvalue` is overwritten.
    """
    dafter = flow.dstates[:, 1:]
    erasing = flow.dvalue.mul_(part.from_start)
    starting = []
    for r, states in enumerate(carried):
        before, after = states.flatten(0, 1), dafter[r].flatten(0, 1)
        dquery = torch.bmm(flow.reading[r].flatten(0, 1), before.mT).view_as(part.q)
        dkey = torch.bmm(erasing[r].flatten(0, 1), before.mT).view_as(part.k)
        found.q += dquery
        found.k -= dkey
        starting.append(dquery.mul_(part.q).sub_(dkey.mul_(part.k)).sum(-1))
        found.k.flatten(0, 1).baddbmm_(ending[r].flatten(0, 1), after.mT)
    start = torch.stack(starting)
    end = torch.linalg.vecdot(ending, flow.ahead)
    whole = (dafter * carried).sum((-2, -1)) * part.whole[..., 0, 0]
    found.decay += start.flip(-1).cumsum(-1).flip(-1)
    found.decay[..., 1:] += end.cumsum(-1)[..., :-1]
    found.decay += whole[..., None]


def norm_gradient(gradient: torch.Tensor, normalised: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """The gradient of x from that of `normalised` = x * norm, where norm = rsqrt(sum x^2 + epsilon)."""
    if norm is None:
        return gradient
    along = torch.linalg.vecdot(gradient, normalised)[..., None]
    return gradient.addcmul_(normalised, along, value=-1).mul_(norm)
