import math
from dataclasses import replace

import pytest
import torch

import kernel_toys
from automodel_kernels.tuning.accuracy import example_errors, relative_rms
from automodel_kernels.tuning.registry import Cost, Example

INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [0.0, 4.0], 0.75),
        ([3.0, 4.0], [0.0, 0.0], math.sqrt(12.5)),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
        ([NAN, INF, -INF, 2.0], [NAN, INF, -INF, 1.0], 1.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF], [-INF], INF),
        ([NAN], [INF], INF),
        ([2e200], [1e200], 1.0),
        ([2e-200], [1e-200], 1.0),
    ],
)
def test_the_error_is_relative_and_non_finite_values_must_agree(actual, expected, error):
    got = relative_rms(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
    assert got == pytest.approx(error)


def test_types_may_differ_and_shapes_may_not():
    assert relative_rms(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.float64)) == 0
    with pytest.raises(ValueError, match=r"actual must have the shape \(2, 1\), got \(2,\)"):
        relative_rms(torch.ones(2), torch.ones(2, 1))


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(50, generator=generator).to(torch.bfloat16), "w": torch.ones(50), "flag": True}


def operator(run, reference, *, gradients=()):
    return replace(
        kernel_toys.SCALE,
        run=run,
        reference=reference,
        gradients=gradients,
        backward_cost=(lambda **_: Cost(moved_bytes=0)) if gradients else None,
    )


def test_the_reference_runs_in_float64_on_the_same_values():
    seen = []

    def reference(x, *, w, flag):
        seen.append((x.dtype, w.dtype, flag, x.clone()))
        return x * w

    op = operator(lambda x, *, w, flag: x.float() * w * 1.001, reference)
    errors = example_errors(op, Example(label="x", inputs=inputs, tolerance=1.0), device=CPU)
    ((dtype, weight_dtype, flag, x),) = seen
    assert (dtype, weight_dtype, flag) == (torch.float64, torch.float64, True)
    assert torch.equal(x, inputs(CPU)["x"].double())
    assert 5e-4 < errors["output 0"] < 3e-3


def test_gradients_are_compared_by_name():
    def reference(x, *, w, flag):
        return x * w, (x * x).detach(), w * w

    def wrong(x, *, w, flag):
        return x * w, (x * x).detach(), w * w.detach()

    example = Example(label="x", inputs=inputs, tolerance=1.0)
    right = example_errors(operator(reference, reference, gradients=("x", "w")), example, device=CPU)
    assert right.keys() == {"output 0", "output 1", "output 2", "gradient x", "gradient w"}
    assert max(right.values()) < 5e-3
    found = example_errors(operator(wrong, reference, gradients=("x", "w")), example, device=CPU)
    assert found["gradient w"] > 0.1
    assert found["gradient x"] < 5e-3


def test_an_optional_input_that_is_absent_has_no_gradient():
    def run(x, *, bias):
        return x if bias is None else x + bias

    def without(device):
        return {"x": torch.ones(3, device=device), "bias": None}

    example = Example(label="x", inputs=without, tolerance=1.0)
    errors = example_errors(operator(run, run, gradients=("x", "bias")), example, device=CPU)
    assert errors == {"output 0": 0.0, "gradient x": 0.0}
