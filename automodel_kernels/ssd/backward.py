"""The backward of SSD on a GPU: its five launches in their order, six with a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_kernels.ssd.chunk_backward import launch_chunk_backward
from automodel_kernels.ssd.finish import launch_finish_decay, launch_reduce_partials
from automodel_kernels.ssd.gating import launch_ungate
from automodel_kernels.ssd.state_gradients import launch_chunk_gradients
from automodel_kernels.ssd.state_passing import launch_pass_gradients
from automodel_kernels.ssd.tiles import Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["SsdGradients", "ssd_backward_triton"]


@dataclass(frozen=True, kw_only=True)
class SsdGradients:
    """The gradients of the inputs in their shapes, None where an input is absent.

    Those of x, dt, B, C and z have their input's dtype, all others fp32.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None


def ssd_backward_triton(
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
) -> SsdGradients:
    """Five launches, six with z; nothing is checked.

    Args:
        dout: gradient of the output, in x's dtype, of any strides.
        dfinal_states: gradient of the final states [num_seqs, heads, P, N], of any floating dtype; None for 0.
        saved: what the forward left: dts, decay, runs, chunk_states, out_ungated.
        x: this and all that follow as for the forward; the values of seq_idx are in `runs`.
    """
    del seq_idx
    dts, decay, runs, chunk_states, out_ungated = saved
    assert dts is not None
    assert decay is not None
    assert chunk_states is not None
    spans = Spans.of(x, cu_seqlens)
    dy, dz = dout, None
    if z is not None:
        assert out_ungated is not None
        dy, dz = launch_ungate(dout, z=z, out_ungated=out_ungated)
    gradients, factors = launch_chunk_gradients(dy, C, decay=decay, runs=runs, cu_seqlens=cu_seqlens, spans=spans)
    dinitial = launch_pass_gradients(
        gradients,
        factors,
        dfinal_states=dfinal_states,
        cu_seqlens=cu_seqlens,
        spans=spans,
        need_initial=initial_states is not None,
    )
    parts = launch_chunk_backward(
        x,
        dy,
        B,
        C,
        D=D,
        dts=dts,
        decay=decay,
        runs=runs,
        cu_seqlens=cu_seqlens,
        chunk_states=chunk_states,
        chunk_gradients=gradients,
        chunk_factors=factors,
        spans=spans,
    )
    ddt, partial_a, partial_bias = launch_finish_decay(
        dt,
        A,
        dt_bias=dt_bias,
        dts=dts,
        cu_seqlens=cu_seqlens,
        parts=parts,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        spans=spans,
    )
    db, dc, da, dbias, dd = launch_reduce_partials(parts, partial_a=partial_a, partial_bias=partial_bias, dtype=B.dtype)
    return SsdGradients(
        x=parts.dx,
        dt=ddt,
        A=da,
        B=db,
        C=dc,
        D=None if dd is None or D is None else dd.view(D.shape),
        z=dz,
        dt_bias=dbias,
        initial_states=dinitial,
    )
