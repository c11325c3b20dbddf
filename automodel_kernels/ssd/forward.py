"""The forward of SSD on a GPU: its three launches in their order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automodel_kernels.ssd.scan import launch_scan
from automodel_kernels.ssd.segment_states import launch_segment_states
from automodel_kernels.ssd.state_passing import launch_pass_states
from automodel_kernels.ssd.tiles import CHUNK, Spans
from automodel_kernels.tuning.keys import tensors_aligned

__all__ = ["SsdForward", "ssd_forward_triton"]


@dataclass(frozen=True, kw_only=True)
class SsdForward:
    """The results of the forward, and what its backward reads.

    Attributes:
        out: [batch, seqlen, heads, P] in x's dtype.
        final_states: [num_seqs, heads, P, N] fp32; None if not wanted.
        dts: [batch, heads, seqlen] fp32, dt after bias, softplus and clamp.
        decay: [batch, heads, seqlen] fp32, the sum of dt A from the start of a token's block of 64 to it.
        runs: [batch, seqlen] int32, the documents that have begun since the start of a token's chunk; None without
            seq_idx.
        chunk_states: [num_chunks, heads, P, N] in x's dtype, the state that enters each chunk; None if not saved.
        out_ungated: as `out`, before the gate; None if not saved or without a gate.
    """

    out: torch.Tensor
    final_states: torch.Tensor | None
    dts: torch.Tensor
    decay: torch.Tensor
    runs: torch.Tensor | None
    chunk_states: torch.Tensor | None
    out_ungated: torch.Tensor | None


def ssd_forward_triton(
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
    save: bool,
    need_final: bool = True,
    spans: Spans | None = None,
) -> SsdForward:
    """Three launches; nothing is checked. Arguments are those of `mamba_chunk_scan_combined`, further ones:

    Args:
        x: bfloat16, float16 or float32 like B, C and z; all others may have any floating dtype.
        save: whether there will be a backward.
        need_final: whether the final states are wanted.
        spans: how the tokens are cut; by default as `Spans.of` does it.
    """
    spans = Spans.of(x, cu_seqlens) if spans is None else spans
    aligned = tensors_aligned(x, B, C, z)
    segments = launch_segment_states(
        x,
        dt,
        A,
        B,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        spans=spans,
        aligned=aligned,
    )
    final_states = None
    if need_final:
        shape = (spans.num_seqs, *segments.states.shape[1:])
        final_states = x.new_empty(shape, dtype=torch.float32)
    launch_pass_states(
        segments.states,
        segments.factors,
        initial_states=initial_states,
        final_states=final_states,
        cu_seqlens=cu_seqlens,
        spans=spans,
        keep_first=save and spans.segment == CHUNK,
    )
    scanned = launch_scan(
        x,
        B,
        C,
        segments,
        D=D,
        z=z,
        cu_seqlens=cu_seqlens,
        final_states=final_states,
        has_initial=initial_states is not None,
        save=save,
        spans=spans,
        aligned=aligned,
    )
    return SsdForward(
        out=scanned.out,
        final_states=final_states,
        dts=segments.dts,
        decay=segments.decay,
        runs=segments.runs,
        chunk_states=scanned.chunk_states,
        out_ungated=scanned.out_ungated,
    )
