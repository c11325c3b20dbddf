"""The Mamba-2 recurrence token by token, as the formula says it: what every faster path is compared with.

For each head, with x [P], B and C [N] of a token and the state S [P, N]:

    dt = clamp(softplus(dt_raw + dt_bias), *dt_limit)
    S  = exp(dt * A) * S + dt * x B^T
    y  = S C + D * x                        then y * silu(z)

A document begins without a state. It is computed in fp32, or in float64 if x is, and autograd differentiates it.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch.nn import functional

__all__ = ["mamba_chunk_scan_combined_reference"]


def mamba_chunk_scan_combined_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The recurrence with the arguments of `mamba_chunk_scan_combined`, without its checks.

    Args:
        x: [batch, seqlen, heads, head_dim].
        dt: [batch, seqlen, heads].
        A: [heads], negative.
        B: [batch, seqlen, groups, state_dim]; a head reads the group `head // (heads / groups)`.
        C: as B.
        chunk_size: has no meaning here.
        D: [heads] or [heads, head_dim].
        z: as x.
        dt_bias: [heads].
        initial_states: [batch, heads, head_dim, state_dim]; with cu_seqlens [documents, ...].
        seq_idx: [batch, seqlen] integers; the state is dropped wherever one differs from the token before it.
        cu_seqlens: [documents + 1] integers from 0 to seqlen: where the documents of the only row begin and end.
        dt_softplus: whether dt goes through softplus.
        dt_limit: the least and the largest dt.
        return_final_states: adds the state after the row, or after the last document, [batch, heads, head_dim,
            state_dim].
        return_varlen_states: adds the state after each document of cu_seqlens, [documents, ...].

    Returns:
        y in the shape and dtype of x; with states, which have the dtype of the computation, a tuple.
    """
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_heads, num_groups = x.shape[2], B.shape[2]
    wide_x, steps = x.to(work), dt.to(work)
    if dt_bias is not None:
        steps = steps + dt_bias.to(work)
    if dt_softplus:
        steps = functional.softplus(steps)
    steps = steps.clamp(*dt_limit)
    wide_b, wide_c = (each.to(work).repeat_interleave(num_heads // num_groups, dim=2) for each in (B, C))
    shape = (x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, num_heads, x.shape[3], B.shape[3])
    states = x.new_zeros(shape, dtype=work) if initial_states is None else initial_states.to(work)
    inputs = (wide_x, steps, wide_b, wide_c)
    if cu_seqlens is None:
        y, states = _scan(inputs, A.to(work), states, seq_idx)
    else:
        y, states = _scan_documents(inputs, A.to(work), states, seq_idx, cu_seqlens.tolist())
    if D is not None:
        y = y + wide_x * (D if D.ndim == 2 else D[:, None]).to(work)
    if z is not None:
        y = y * functional.silu(z.to(work))
    results = [y.to(x.dtype)]
    if return_final_states:
        results.append(states if cu_seqlens is None else _last(states))
    if return_varlen_states:
        results.append(states)
    return results[0] if len(results) == 1 else tuple(results)


def _scan(
    inputs: tuple[torch.Tensor, ...], A: torch.Tensor, states: torch.Tensor, seq_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y without D and z, and the last states; x [B, T, H, P], dt [B, T, H], B and C [B, T, H, N]."""
    x, dt, b, c = inputs
    made = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            states = states.where((seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None], 0.0)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        states = decay * states + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        made.append(torch.einsum("bhpn,bhn->bhp", states, c[:, t]))
    return torch.stack(made, dim=1) if made else x, states


def _scan_documents(
    inputs: tuple[torch.Tensor, ...],
    A: torch.Tensor,
    states: torch.Tensor,
    seq_idx: torch.Tensor | None,
    bounds: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document of the only row alone."""
    made, final = [inputs[0][:, :0]], [states[:0]]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = tuple(each[:, begin:end] for each in inputs)
        ids = None if seq_idx is None else seq_idx[:, begin:end]
        y, state = _scan(part, A, states[number : number + 1], ids)
        made.append(y)
        final.append(state)
    return torch.cat(made, dim=1), torch.cat(final)


def _last(states: torch.Tensor) -> torch.Tensor:
    """The last document's state, [1, ...]; zeros if there is no document."""
    return states[-1:] if len(states) else states.new_zeros((1, *states.shape[1:]))
