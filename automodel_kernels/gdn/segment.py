"""What the torch path forms of some chunks at once, and how states run through them; formulas in `chunked`.

G stands for the value heads that share a query head, N for batch * heads; tensors are laid out as by `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from automodel_kernels.gdn.reference import NORM_EPSILON

if TYPE_CHECKING:
    from automodel_kernels.gdn.layout import Layout

__all__ = ["Segment", "begin_states", "form_segment", "invert_unit_lower", "replay_states", "run_states"]

# Of the triangular systems that are solved row by row; larger ones are put together by matrix products.
SOLVED = 16

# A decay of exp(-1000) is zero in every data type, and sums of such numbers never overflow or become NaN.
STRONGEST = -1000.0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What forward and backward both form of some steps; G stands for group, N for batch * heads.

    Attributes:
        q, k: [steps, N, chunk, key_dim], normalised if asked for, not scaled.
        q_norm, k_norm: what they were multiplied by, [steps, N, chunk, 1], or None.
        beta: [G, steps, N, chunk, 1].
        from_start, to_end: e and f, [G, steps, N, chunk, 1].
        whole: e_Q, [G, steps, N, 1, 1].
        pairs: E, [G, steps, N, chunk, chunk].
        products: k k^T, [steps, N, chunk, chunk].
    """

    q: torch.Tensor
    k: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    beta: torch.Tensor
    from_start: torch.Tensor
    to_end: torch.Tensor
    whole: torch.Tensor
    pairs: torch.Tensor
    products: torch.Tensor


def form_segment(
    layout: Layout,
    steps: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    *,
    l2norm: bool,
) -> Segment:
    """What forward and backward both need of some steps.

    Args:
        layout: of the batch.
        steps: the first one and the one after the last.
        q: [batch, seqlen, heads, key_dim].
        k: [batch, seqlen, heads, key_dim].
        decay: [batch, seqlen, value_heads], float64.
        strength: beta, of that shape; its dtype is computed in.
        l2norm: whether q and k are normalised.
    """
    dtype = strength.dtype
    queries, keys = (layout.take(each, steps, dtype=dtype, group=1)[0] for each in (q, k))
    norms: list[torch.Tensor | None] = [None, None]
    if l2norm:
        for place, each in enumerate((queries, keys)):
            norm = torch.linalg.vecdot(each, each)[..., None].add_(NORM_EPSILON).rsqrt_()
            each.mul_(norm)
            norms[place] = norm
    sums = layout.take(decay[..., None], steps, dtype=torch.float64).clamp_(min=STRONGEST).cumsum(-2)
    last = sums[..., -1:, :]
    above = torch.full((layout.sizes.chunk,) * 2, -torch.inf, dtype=dtype, device=q.device).triu_(1)
    pairs = (sums - sums.mT).to(dtype).add_(above).exp_()
    return Segment(
        q=queries,
        k=keys,
        q_norm=norms[0],
        k_norm=norms[1],
        beta=layout.take(strength[..., None], steps, dtype=dtype),
        from_start=sums.exp().to(dtype),
        to_end=(last - sums).exp().to(dtype),
        whole=last.exp().to(dtype),
        pairs=pairs,
        products=torch.bmm(keys.flatten(0, 1), keys.flatten(0, 1).mT).unflatten(0, keys.shape[:2]),
    )


def invert_unit_lower(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Writes (I + M)^-1 to `out`, M the strict lower triangle of `matrix`; both [count, size, size]."""
    count, size = matrix.shape[:2]
    blocks = size // SOLVED
    diagonal = matrix.view(count, blocks, SOLVED, blocks, SOLVED).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    unit = torch.eye(SOLVED, dtype=matrix.dtype, device=matrix.device)
    solved = torch.linalg.solve_triangular(diagonal, unit, upper=False, unitriangular=True)
    out.zero_()
    out.view(count, blocks, SOLVED, blocks, SOLVED).diagonal(dim1=1, dim2=3).copy_(solved.permute(0, 2, 3, 1))
    width = SOLVED
    while width < size:
        for start in range(0, size, 2 * width):
            left, right = slice(start, start + width), slice(start + width, start + 2 * width)
            below = torch.bmm(out[:, right, right], matrix[:, right, left])
            out[:, right, left] = torch.bmm(below, out[:, left, left]).neg_()
        width *= 2


def run_states(
    layout: Layout,
    steps: tuple[int, int],
    part: Segment,
    value: torch.Tensor,
    inverse: torch.Tensor,
    error: torch.Tensor,
    state: torch.Tensor,
    initial: torch.Tensor | None,
    finals: torch.Tensor,
) -> torch.Tensor:
    """Fills `error`; the states before each step and after the last, [G, steps + 1, N, key_dim, value_dim]."""
    group, count = value.shape[:2]
    carried = value.new_empty(group, count + 1, *state.shape[1:])
    carried[:, 0] = state
    passing = torch.empty_like(value[:, 0])
    # By step and, where matrices are multiplied, by value head of the group: views, made once.
    keys, states, values, errors = (each.unbind(-4) for each in (part.k, carried, value, error))
    from_start, writing, whole = (each.unbind(1) for each in (part.from_start, part.beta * part.to_end, part.whole))
    head_states, head_errors, head_inverses = ([head.unbind(0) for head in each] for each in (carried, error, inverse))
    heads = list(enumerate(passing))
    for c, step in enumerate(range(*steps)):
        key = keys[c]
        begin_states(states[c], layout.begins.get(step), initial)
        for r, each in heads:
            torch.bmm(key, head_states[r][c], out=each)
        torch.addcmul(values[c], passing, from_start[c], value=-1, out=passing)
        for r, each in heads:
            torch.bmm(head_inverses[r][c], each, out=head_errors[r][c])
        torch.mul(errors[c], writing[c], out=passing)
        torch.mul(states[c], whole[c], out=states[c + 1])
        for r, each in heads:
            head_states[r][c + 1].baddbmm_(key.mT, each)
        if step in layout.ends:
            target = finals[:, layout.ends[step]]
            target.copy_(states[c + 1].view(target.shape))
    return carried


def begin_states(state: torch.Tensor, sequences: slice | None, given: torch.Tensor | None) -> None:
    """Sets a state [G, N, ...] to those given for the sequences [G, sequences, heads, ...], or zero, if there are."""
    if sequences is None:
        return
    if given is None:
        state.zero_()
    else:
        state.copy_(given[:, sequences].flatten(1, 2))


def replay_states(
    layout: Layout,
    steps: tuple[int, int],
    part: Segment,
    ending: torch.Tensor,
    state: torch.Tensor,
    initial: torch.Tensor | None,
) -> torch.Tensor:
    """The states before each step, [G, steps, N, key_dim, value_dim], from the forward's errors.

    Args:
        ending: f beta u.
        state: that before the first step.
    """
    group, count = ending.shape[:2]
    carried = state.new_empty(group, count, *state.shape[1:])
    carried[:, 0] = state
    if count > 1:
        for r in range(group):
            torch.bmm(part.k[:-1].flatten(0, 1).mT, ending[r, :-1].flatten(0, 1), out=carried[r, 1:].flatten(0, 1))
    states, whole = carried.unbind(1), part.whole.unbind(1)
    for c, step in enumerate(range(*steps)):
        if c:
            states[c].addcmul_(states[c - 1], whole[c - 1])
        begin_states(states[c], layout.begins.get(step), initial)
    return carried
