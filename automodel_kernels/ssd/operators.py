"""SSD as PyTorch sees it: two custom operators, with fake versions for tracing and the gradient of the first.

`ssd` returns the output, the final states, and what its gradient reads again; `ssd_backward` returns one gradient per
floating input. What is absent is an empty tensor. By device they run the Triton kernels or the torch path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from automodel_kernels.hardware import runs_triton
from automodel_kernels.ssd.backward import ssd_backward_triton
from automodel_kernels.ssd.chunked import ssd_backward_torch, ssd_forward_torch
from automodel_kernels.ssd.forward import ssd_forward_triton
from automodel_kernels.ssd.tiles import Spans

__all__ = ["Operands", "ssd", "ssd_backward"]

OPERANDS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx, Tensor? cu_seqlens, bool dt_softplus, float dt_least, float dt_greatest"
)
NUM_DIFFERENTIABLE, NUM_TENSORS = 9, 11


class Operands(NamedTuple):
    """What both operators are given, in this order; shapes and meanings as of `mamba_chunk_scan_combined`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    dt_softplus: bool
    dt_least: float
    dt_greatest: float

    @property
    def options(self) -> dict[str, Any]:
        """What comes after C, as the functions behind the operators take it."""
        names = ("D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens", "dt_softplus")
        return {name: getattr(self, name) for name in names} | {"dt_limit": (self.dt_least, self.dt_greatest)}


def _or_empty(like: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [like.new_empty(0) if each is None else each for each in tensors]


def _or_none(*tensors: Tensor) -> list[Tensor | None]:
    """The inverse of `_or_empty`; the tensors that it is for have elements if they are there."""
    return [each if each.numel() else None for each in tensors]


def _final_states(given: Operands) -> Tensor:
    """Without values, one state for each sequence."""
    sequences = given.x.shape[0] if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    shape = (sequences, *given.x.shape[2:], given.B.shape[3])
    return given.x.new_empty(shape, dtype=torch.promote_types(given.x.dtype, torch.float32))


def _empty_saved(given: Operands) -> list[Tensor]:
    """What the kernels save, without values."""
    x = given.x
    batch, seqlen, heads, head_dim = x.shape
    chunks = Spans.of(x, given.cu_seqlens).num_chunks
    return _or_empty(
        x,
        x.new_empty((batch, heads, seqlen), dtype=torch.float32),
        x.new_empty((batch, heads, seqlen), dtype=torch.float32),
        None if given.seq_idx is None else x.new_empty((batch, seqlen), dtype=torch.int32),
        x.new_empty((chunks, heads, head_dim, given.B.shape[3])),
        None if given.z is None else x.new_empty(x.shape),
    )


@torch.library.custom_op(
    "automodel_kernels::ssd",
    mutates_args=(),
    schema=f"({OPERANDS}, bool need_final, bool save) -> (Tensor, Tensor, Tensor[])",
)
def ssd(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the final states, and with `save` what the backward of the kernels reads; nothing is checked.

    The torch path saves nothing.

    Args:
        arguments: those of `Operands`; then whether final states are needed, and whether there will be a backward.
    """
    *rest, need_final, save = arguments
    given = Operands(*rest)
    if not runs_triton(given.x.device):
        out, final_states = ssd_forward_torch(*given[:5], **given.options)
        return out, final_states if need_final else out.new_empty(0), []
    if not given.x.numel():
        # There are no empty grids; the states pass unchanged.
        final_states = _final_states(given).zero_()
        if given.initial_states is not None:
            final_states.copy_(given.initial_states)
        nothing = given.x.new_empty(0)
        return torch.empty_like(given.x), final_states if need_final else nothing, _empty_saved(given) if save else []
    found = ssd_forward_triton(*given[:5], save=save, need_final=need_final, **given.options)
    saved = (found.dts, found.decay, found.runs, found.chunk_states, found.out_ungated)
    (final_states,) = _or_empty(given.x, found.final_states)
    return found.out, final_states, _or_empty(given.x, *saved) if save else []


@ssd.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *rest, need_final, save = arguments
    given = Operands(*rest)
    x = given.x
    final_states = _final_states(given) if need_final else x.new_empty(0)
    saved = _empty_saved(given) if save and runs_triton(x.device) else []
    return x.new_empty(x.shape), final_states, saved


@torch.library.custom_op(
    "automodel_kernels::ssd_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dfinal_states, Tensor[] saved, {OPERANDS}) -> Tensor[]",
)
def ssd_backward(dout: Tensor, dfinal_states: Tensor | None, saved: list[Tensor], *operands: Any) -> list[Tensor]:
    """The gradients of x, dt, A, B, C, D, z, dt_bias and initial_states, in their shapes and dtypes.

    Args:
        dout: gradient of the output, of any strides.
        dfinal_states: gradient of the final states.
        saved: what `ssd` saved.
        operands: those of `Operands`.
    """
    given = Operands(*operands)
    if not given.x.numel():
        *zeros, dinitial = (given.x.new_empty(0) if each is None else torch.zeros_like(each) for each in given[:9])
        if dfinal_states is not None and given.initial_states is not None:
            dinitial.copy_(dfinal_states)
        return [*zeros, dinitial]
    backward: Any = ssd_backward_triton if runs_triton(given.x.device) else ssd_backward_torch
    found = backward(dout.to(given.x.dtype), dfinal_states, _or_none(*saved), *given[:5], **given.options)
    names = Operands._fields[:NUM_DIFFERENTIABLE]
    gradients = [(getattr(given, name), getattr(found, name)) for name in names]
    return [
        given.x.new_empty(0) if each is None or gradient is None else gradient.to(each.dtype)
        for each, gradient in gradients
    ]


@ssd_backward.register_fake
def _(dout: Tensor, dfinal_states: Tensor | None, saved: list[Tensor], *operands: Any) -> list[Tensor]:
    x = operands[0]
    return [x.new_empty(0) if each is None else each.new_empty(each.shape) for each in operands[:NUM_DIFFERENTIABLE]]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    _, _, saved = output
    ctx.num_saved = len(saved)
    ctx.save_for_backward(*saved, *inputs[:NUM_TENSORS])
    ctx.settings = inputs[NUM_TENSORS : len(Operands._fields)]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dfinal_states: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    # Read once: activation checkpointing computes them anew at every reading.
    kept = ctx.saved_tensors
    saved, tensors = kept[: ctx.num_saved], kept[ctx.num_saved :]
    dout = torch.zeros_like(tensors[0]) if dout is None else dout
    gradients = ssd_backward(dout, dfinal_states, list(saved), *tensors, *ctx.settings)
    found = [None if each is None else gradient for each, gradient in zip(tensors, gradients, strict=False)]
    # Neither the two packings nor the settings have a gradient, need_final and save among them.
    return *found, *[None] * (len(Operands._fields) + 2 - len(found))


def _refuse_second_order(*_: Any) -> None:
    raise RuntimeError(
        "mamba_chunk_scan_combined has first derivatives only: its backward was differentiated (create_graph=True)"
    )


ssd.register_autograd(_differentiate, setup_context=_keep_for_backward)
ssd_backward.register_autograd(_refuse_second_order, setup_context=lambda ctx, inputs, output: None)
