"""The backward of the gated delta rule: two launches, three where sequences are split.

gradient_maps   (only split) what each segment does to a state's gradient
gradient_scan   gradients of the states between chunks in reverse, dv
chunk_backward  dq, dk, dg, dbeta from the kept states and their gradients, chunks in parallel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_kernels.gdn.chunk_backward import chunk_backward
from automodel_kernels.gdn.gradient_maps import gradient_maps
from automodel_kernels.gdn.gradient_scan import Inputs, gradient_scan
from automodel_kernels.gdn.tiles import Spans

if TYPE_CHECKING:
    import torch

    from automodel_kernels.gdn.forward import Saved

__all__ = ["Gradients", "gdn_backward_triton"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of the inputs, in their shapes; None for what is absent or was not asked for.

    Attributes:
        q: like q.
        k: like k.
        v: in q's dtype.
        g: like g.
        beta: like beta.
        A_log: like A_log.
        dt_bias: like dt_bias.
        initial_state: [sequences, HV, K, V] fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def gdn_backward_triton(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    saved: Saved,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    cu_seqlens: torch.Tensor | None,
    need_initial: bool,
    segment: int | None = None,
) -> Gradients:
    """The gradients, by the kernels.

    Args:
        do: the outputs' gradient [B, T, HV, V] in q's dtype, any strides.
        dfinal: the final states' gradient [sequences, HV, K, V]; None counts as zero.
        saved: what `gdn_forward_triton` kept.
        q: as given to it, like all further arguments up to `cu_seqlens`.
        need_initial: whether the initial states' gradient is wanted.
        segment: tokens in a segment, a multiple of the chunk; by default chosen from the shapes.
    """
    assert saved.states is not None
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        do=do,
        g=g,
        beta=beta,
        inverse=saved.inverse,
        q_rstd=saved.q_rstd,
        k_rstd=saved.k_rstd,
        A_log=A_log.contiguous() if gate and A_log is not None else None,
        dt_bias=dt_bias.contiguous() if gate and dt_bias is not None else None,
        cu_seqlens=cu_seqlens,
        scale=scale,
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        spans=Spans.of(v, cu_seqlens, chunk=saved.inverse.shape[-1], segment=segment),
    )
    maps = gradient_maps(inputs) if inputs.spans.split else None
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    dv, gradients, dinitial = gradient_scan(inputs, maps=maps, dfinal=dfinal, need_initial=need_initial)
    found = chunk_backward(inputs, states=saved.states, gradients=gradients)
    return Gradients(
        q=found.q,
        k=found.k,
        v=dv,
        g=found.g,
        beta=found.beta,
        A_log=None if A_log is None or found.A_log is None else found.A_log.sum(0).to(A_log.dtype),
        dt_bias=None if dt_bias is None or found.dt_bias is None else found.dt_bias.sum(0).to(dt_bias.dtype),
        initial_state=dinitial,
    )
