"""The gated delta rule token by token, as plain as its formula.

For one value head, with the state S [key_dim, value_dim] and S_0 its initial state or zero:

    S'_t = exp(g_t) S_{t-1}    d_t = beta_t (v_t - S'_t^T k_t)    S_t = S'_t + k_t d_t^T    o_t = scale S_t^T q_t

Value heads share queries and keys in groups: value head i has those of head i // (value_heads // heads). Formula: Yang,
Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NORM_EPSILON", "accumulator_dtype", "chunk_gated_delta_rule_reference", "sequence_bounds"]

NORM_EPSILON = 1e-6
"""Is added to the sum of squares where queries and keys are normalised."""


def chunk_gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    head_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence with the arguments of `chunk_gated_delta_rule`, differentiable by autograd.

    Computes in float64 if an input is, else in float32. A sequence is a row of the batch or, with cu_seqlens, a
    document of the only row; it may be empty.

    Args:
        q: [batch, seqlen, heads, key_dim].
        k: [batch, seqlen, heads, key_dim].
        v: [batch, seqlen, value_heads, value_dim]; value_heads is a multiple of heads.
        g: [batch, seqlen, value_heads], the logarithm of the decay; with `use_gate_in_kernel` the raw gate.
        beta: [batch, seqlen, value_heads]; with `use_beta_sigmoid_in_kernel` before its sigmoid.
        scale: of the outputs; by default key_dim**-0.5.
        initial_state: [sequences, value_heads, key_dim, value_dim]; zero by default.
        output_final_state: whether the states after the sequences are returned.
        use_qk_l2norm_in_kernel: whether q and k are multiplied by rsqrt(sum of squares + 1e-6).
        cu_seqlens: [sequences + 1] integers, where documents begin and the last one ends.
        head_first: must be False.
        use_gate_in_kernel: whether g stands for -exp(A_log) * softplus(g + dt_bias).
        A_log: [value_heads].
        dt_bias: [value_heads]; zero by default.
        use_beta_sigmoid_in_kernel: whether beta stands for sigmoid(beta).
        allow_neg_eigval: whether that sigmoid is doubled, so that eigenvalues of the transition reach -1.
        chunk_size: has no meaning here.

    Returns:
        The outputs [batch, seqlen, value_heads, value_dim] in v's dtype, and the final states [sequences,
        value_heads, key_dim, value_dim] in float32, or float64 if an input is, or None.
    """
    assert not head_first
    dtype = accumulator_dtype(q, k, v, g, beta)
    group = v.shape[2] // q.shape[2]
    queries, keys = (each.to(dtype) for each in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in (queries, keys))
    queries = queries * (q.shape[3] ** -0.5 if scale is None else scale)
    queries, keys = (each.repeat_interleave(group, dim=2) for each in (queries, keys))
    decay, strength = g.to(dtype), beta.to(dtype)
    if use_gate_in_kernel:
        assert A_log is not None
        shifted = decay if dt_bias is None else decay + dt_bias.to(dtype)
        decay = -A_log.to(dtype).exp() * functional.softplus(shifted)
    if use_beta_sigmoid_in_kernel:
        strength = strength.sigmoid() * (2 if allow_neg_eigval else 1)
    values = v.to(dtype)
    outputs, states = [], []
    for number, (row, begin, end) in enumerate(sequence_bounds(v, cu_seqlens)):
        if initial_state is None:
            state = values.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        else:
            state = initial_state[number].to(dtype)
        # Cut into tokens at once: a gradient through one token's index would be as large as the whole.
        tokens = (each[row, begin:end].unbind() for each in (queries, keys, values, decay.exp(), strength))
        for query, key, value, factor, weight in zip(*tokens, strict=True):
            state = state * factor[:, None, None]
            error = value - torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, weight[:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, query))
        states.append(state)
    o = torch.stack(outputs).view(v.shape).to(v.dtype) if outputs else v * 0
    final_state = torch.stack(states) if states else values.new_zeros(0, v.shape[2], q.shape[3], v.shape[3])
    return o, final_state if output_final_state else None


def accumulator_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """What is computed in, which is the states' data type too: float64 if one of the tensors is, else float32."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def sequence_bounds(v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Sequence[tuple[int, int, int]]:
    """The row, first token and token after the last of each sequence; waits for cu_seqlens if it is on a GPU.

    Args:
        v: [batch, seqlen, ...].
        cu_seqlens: [sequences + 1], or None where each row is a sequence.
    """
    if cu_seqlens is None:
        return [(row, 0, v.shape[1]) for row in range(v.shape[0])]
    borders = cu_seqlens.tolist()
    return [(0, begin, end) for begin, end in itertools.pairwise(borders)]
