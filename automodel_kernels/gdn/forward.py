"""The Gated DeltaNet forward on Triton: two launches, three where the sequence is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_kernels.gdn.chunk_inverse import chunk_inverse
from automodel_kernels.gdn.scan import scan
from automodel_kernels.gdn.segment_maps import segment_maps
from automodel_kernels.gdn.tiles import Spans, choose_chunk
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    import torch

__all__ = ["Forward", "Saved", "gdn_forward_triton"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a backward needs of a forward.

    Attributes:
        inverse: [batch, value heads, seqlen, chunk] in q's dtype; its last size is the chunk of the call.
        q_rstd: [batch, seqlen, heads] fp32 with l2norm.
        k_rstd: [batch, seqlen, heads] fp32 with l2norm.
        states: [chunks, value heads, K, V] in q's dtype, at the chunks' starts, if they were to be saved.
    """

    inverse: torch.Tensor
    q_rstd: torch.Tensor | None
    k_rstd: torch.Tensor | None
    states: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Forward(Saved):
    """What is saved, and the results.

    Attributes:
        o: [batch, seqlen, value heads, V] in v's dtype.
        final_state: [sequences, value heads, K, V] fp32.
    """

    o: torch.Tensor
    final_state: torch.Tensor


def gdn_forward_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    l2norm: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    save: bool,
    segment: int | None = None,
) -> Forward:
    """Launches the kernels; nothing is checked.

    Args:
        q: [batch, seqlen, heads, K].
        k: [batch, seqlen, heads, K] in q's dtype.
        v: [batch, seqlen, value heads, V] in q's dtype.
        g: [batch, seqlen, value heads], any floating dtype: log gates, or with `gate` what they are made of.
        beta: [batch, seqlen, value heads], any floating dtype; with `beta_sigmoid` before its sigmoid.
        scale: of the outputs.
        initial_state: [sequences, value heads, K, V], any floating dtype; zero if None.
        l2norm: whether q and k are normalised.
        A_log: [value heads] with `gate`.
        dt_bias: [value heads] or None, with `gate`.
        gate: whether the log gate is -exp(A_log) softplus(g + dt_bias).
        beta_sigmoid: whether beta is the sigmoid of what is given.
        neg_eigval: whether that sigmoid is doubled.
        cu_seqlens: [documents + 1] int32 or None.
        chunk_size: the largest chunk, at least 16.
        save: whether the states at the chunks' starts are kept for a backward.
        segment: tokens in a segment, a multiple of the largest chunk; by default chosen from the shapes.
    """
    aligned = tensors_aligned(q, k, v, initial_state)
    spans = Spans.of(v, cu_seqlens, chunk=choose_chunk(q, chunk_size=chunk_size), segment=segment)
    if not gate:
        A_log = dt_bias = None
    inverse, q_rstd, k_rstd = chunk_inverse(
        q,
        k,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        l2norm=l2norm,
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        spans=spans,
        aligned=aligned,
    )
    maps = None
    if spans.split:
        maps = segment_maps(
            k,
            v,
            g,
            beta,
            inverse=inverse,
            k_rstd=k_rstd,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
            beta_sigmoid=beta_sigmoid,
            neg_eigval=neg_eigval,
            spans=spans,
            aligned=aligned,
        )
    o, final_state, states = scan(
        q,
        k,
        v,
        g,
        beta,
        inverse=inverse,
        q_rstd=q_rstd,
        k_rstd=k_rstd,
        maps=maps,
        scale=scale,
        initial_state=initial_state,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        spans=spans,
        aligned=aligned,
        save=save,
    )
    return Forward(o=o, final_state=final_state, inverse=inverse, q_rstd=q_rstd, k_rstd=k_rstd, states=states)
