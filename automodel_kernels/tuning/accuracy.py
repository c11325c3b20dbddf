"""How far an operator's results are from its reference in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from automodel_kernels.tuning.registry import Example, Op

__all__ = ["example_errors", "relative_rms", "run_with_gradients"]


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference over that of the expected values, both in float64.

    Where the expected values are all zero it is the root mean square of the difference. NaN and Inf must stand at the
    same places with the same sign, else the result is infinite; the error is then that of the finite values.

    Args:
        actual: any shape, dtype and device.
        expected: the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual must have the shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    got, want = (each.detach().cpu().to(torch.float64).flatten() for each in (actual, expected))
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(
        got[~finite].nan_to_num(), want[~finite].nan_to_num()
    ):
        return math.inf
    got, want = got[finite], want[finite]
    if not want.numel():
        return 0.0
    # Scaled, so that values near the ends of float64's range have squares.
    scale = max(float(want.abs().max()), float(got.abs().max())) or 1.0
    difference, size = torch.linalg.vector_norm((got - want) / scale), torch.linalg.vector_norm(want / scale)
    if not float(size):
        return float(difference) * scale / math.sqrt(want.numel())
    return float(difference / size)


def example_errors(op: Op, example: Example, *, device: torch.device) -> dict[str, float]:
    """Runs an operator and its reference in float64 on an example, backward too; the relative RMS error of each result.

    Args:
        op: the operator.
        example: one of its examples.
        device: where to run both.

    Returns:
        By `output 0`, ..., and `gradient NAME`.
    """
    results = run_with_gradients(op, op.run, inputs=example.inputs(device))
    wide = {name: _widen(each) for name, each in example.inputs(device).items()}
    expected = run_with_gradients(op, op.reference, inputs=wide)
    return {name: relative_rms(results[name], each) for name, each in expected.items()}


def _widen(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float64) if floating else value


def run_with_gradients(op: Op, function: Callable[..., Any], *, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The outputs of a function with an operator's arguments, and the gradients if the operator has any.

    The outputs' gradients are random, the same at every call and exact in bfloat16.

    Args:
        op: says which inputs receive gradients; of optional ones those that are given.
        function: `op.run` or `op.reference`.
        inputs: its arguments.

    Returns:
        By `output 0`, ..., and `gradient NAME`.
    """
    given = [name for name in op.gradients if inputs.get(name) is not None]
    for name in given:
        inputs[name].requires_grad_()
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {number}": each for number, each in enumerate(outputs)}
    if given:
        differentiable = [each for each in outputs if each.requires_grad]
        generator = torch.Generator().manual_seed(0)
        cotangents = [
            torch.randn(each.shape, generator=generator).to(torch.bfloat16).to(each.device, each.dtype)
            for each in differentiable
        ]
        gradients = torch.autograd.grad(differentiable, [inputs[name] for name in given], cotangents)
        results |= {f"gradient {name}": each for name, each in zip(given, gradients, strict=True)}
    return results
