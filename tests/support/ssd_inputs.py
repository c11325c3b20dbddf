"""Inputs of SSD's forward kernels for tests, and the check of their results."""

import dataclasses
import itertools
import math

import torch

from automodel_kernels.ssd.forward import ssd_forward_triton
from automodel_kernels.ssd.reference import mamba_chunk_scan_combined_reference
from automodel_kernels.ssd.tiles import Spans
from automodel_kernels.tuning.accuracy import relative_rms

__all__ = ["ABSENT", "NAN", "TOLERANCES", "borders", "check", "cut", "inputs", "reference"]

ABSENT = {
    "D": None,
    "z": None,
    "dt_bias": None,
    "initial_states": None,
    "seq_idx": None,
    "cu_seqlens": None,
    "dt_softplus": False,
    "dt_limit": (0.0, math.inf),
}
TOLERANCES = {torch.float32: 1.5e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
NAN = math.nan


def inputs(
    *, batch=1, seqlen=100, heads=2, groups=1, dim=32, state=16, dtype=torch.float16, seqs=None, seed=0, only=()
):
    """The five tensors that are always there, and those options that `only` names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    seqs = batch if seqs is None else seqs
    made = {
        "x": normal(batch, seqlen, heads, dim).to(dtype),
        # Steps as training makes them: after softplus from 0.01 to 1.
        "dt": normal(batch, seqlen, heads) - 2.0,
        "A": -torch.exp(normal(heads)),
        # With a mean, so that not even a single C.B is much smaller than what it is summed from.
        "B": (normal(batch, seqlen, groups, state) + 0.5).to(dtype),
        "C": (normal(batch, seqlen, groups, state) + 0.5).to(dtype),
    }
    options = {
        "D": normal(heads),
        "z": normal(batch, seqlen, heads, dim).to(dtype),
        "dt_bias": normal(heads),
        "initial_states": normal(seqs, heads, dim, state),
    }
    return made | ABSENT | {"dt_softplus": True} | {name: options[name] for name in only}


def reference(given):
    """out, the final states, and the states after each document of cu_seqlens."""
    wide = {
        name: each.to(torch.float64) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in given.items()
    }
    varlen = given["cu_seqlens"] is not None
    results = mamba_chunk_scan_combined_reference(
        **wide, chunk_size=64, return_final_states=True, return_varlen_states=varlen
    )
    return results[0], results[-1]


def check(given, *, save=True, spans=None):
    """Runs the kernels; output and final states must be those of the recurrence."""
    got = ssd_forward_triton(**given, save=save, spans=spans)
    out, states = reference(given)
    tolerance = TOLERANCES[given["x"].dtype]
    assert got.out.dtype == given["x"].dtype
    assert got.final_states.dtype == torch.float32
    assert relative_rms(got.out, out) <= tolerance
    assert relative_rms(got.final_states, states) <= tolerance
    return got


def cut(*, seqlen, segment, seqs=1, varlen=False):
    """Spans with segments of another length than the host would choose."""
    x = torch.empty(1 if varlen else seqs, seqlen, 1, 1, device="meta")
    spans = Spans.of(x, torch.empty(seqs + 1, device="meta") if varlen else None)
    number = seqlen // segment + seqs if varlen else seqs * -(-seqlen // segment)
    return dataclasses.replace(spans, segment=segment, num_segments=number)


def borders(*places, seqlen, ids=(7, 3, 7, -1)):
    """seq_idx of one row with another document from each place on; ids come back."""
    seq_idx = torch.empty(1, seqlen, dtype=torch.int32)
    for number, (begin, end) in enumerate(itertools.pairwise((0, *places, seqlen))):
        seq_idx[:, begin:end] = ids[number % len(ids)]
    return seq_idx
