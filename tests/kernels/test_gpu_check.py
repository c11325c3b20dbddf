import importlib.util
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import kernel_toys
from automodel_kernels.row_norm import ROW_NORM
from automodel_kernels.tuning.registry import Cost
from house_rules import REPOSITORY

SCRIPT = REPOSITORY / "bench" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so_and_succeeds():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU is here: ")


def test_the_floor_is_the_slower_of_memory_and_products(gpu_check):
    speed = gpu_check.Speed(bytes_per_second=4e12, flops_per_second=8e14)
    assert gpu_check.floor_milliseconds(Cost(moved_bytes=4 * 10**9), speed) == pytest.approx(1.0)
    assert gpu_check.floor_milliseconds(Cost(moved_bytes=4 * 10**9, flops=16 * 10**11), speed) == pytest.approx(2.0)


def test_a_wrong_and_a_broken_operator_fail_with_their_reason(gpu_check):
    example, device = kernel_toys.SCALE.examples()[0], torch.device("cpu")
    right = gpu_check.check(kernel_toys.SCALE, example, device)
    wrong = gpu_check.check(replace(kernel_toys.SCALE, run=lambda x, **_: x), example, device)
    only = replace(kernel_toys.SCALE, run=lambda **_: 1 / 0, examples=lambda: [example])
    (broken,) = run(gpu_check, only).checks
    assert (right.passed, wrong.passed, broken.passed) == (True, False, False)
    assert wrong.error > 0.5
    assert broken.error == math.inf
    timing = gpu_check.Timing(name="scale big", milliseconds=2.0, floor=1.5, moved_bytes=8 * 10**9, flops=10**12)
    results = gpu_check.Results(checks=[right, wrong, broken], timings=[timing], untimed=["scale huge"])
    text = gpu_check.report(results)
    assert "FAILED: output 0" in text
    assert "FAILED: ZeroDivisionError: division by zero" in text
    assert text.splitlines()[5].split()[-5:] == ["2.0000", "1.5000", "75%", "4000", "500.0"]
    assert text.endswith("left out, no time: scale huge")


def run(gpu_check, *ops, seconds=60.0, **changes):
    """On the CPU, where the operators take their torch paths."""
    speed = gpu_check.Speed(bytes_per_second=1e10, flops_per_second=1e11)
    return gpu_check.run(ops, torch.device("cpu"), speed=speed, deadline=time.monotonic() + seconds, **changes)


def timed(op, **changes):
    """The operator with a large example, too, which comes first."""
    small = op.examples()[0]
    return replace(op, examples=lambda: [replace(small, label="big", large=True), small], **changes)


def test_a_run_checks_and_times_and_succeeds(gpu_check):
    results = run(gpu_check, timed(kernel_toys.SCALE))
    assert [each.name for each in results.checks] == ["scale 1000 square=False"]
    (timing,) = results.timings
    assert (timing.name, timing.moved_bytes) == ("scale big", 4000)
    assert timing.floor == pytest.approx(4e-4)
    assert timing.milliseconds > 0
    assert results.exit_code == 0
    assert "scale big" in gpu_check.report(results)


def test_backward_is_timed_too_and_what_was_timed_before_a_failure_stays(gpu_check):
    cost = {"gradients": ("x",), "backward_cost": lambda **_: Cost(moved_bytes=8000)}
    results = run(gpu_check, timed(kernel_toys.SCALE, **cost))
    assert [(each.name, each.moved_bytes) for each in results.timings] == [
        ("scale big", 4000),
        ("scale big backward", 8000),
    ]
    broken = run(gpu_check, timed(kernel_toys.SCALE, **cost | {"backward_cost": lambda **_: 1 / 0}))
    assert [each.name for each in broken.timings] == ["scale big"]
    assert broken.exit_code == 1


def test_an_operator_that_cannot_be_timed_fails_and_hides_no_other(gpu_check):
    results = run(gpu_check, timed(kernel_toys.SCALE, name="a", cost=lambda **_: 1 / 0), timed(kernel_toys.SCALE))
    assert [each.name for each in results.timings] == ["scale big"]
    assert [each.name for each in results.checks if not each.passed] == ["a big"]
    assert results.exit_code == 1
    assert "FAILED: ZeroDivisionError: division by zero" in gpu_check.report(results)


def test_an_example_without_inputs_fails_and_hides_no_other(gpu_check):
    bad = replace(kernel_toys.SCALE.examples()[0], label="bad", inputs=lambda device: 1 / 0)
    results = run(gpu_check, replace(kernel_toys.SCALE, examples=lambda: [bad]), kernel_toys.SCALE)
    assert [each.passed for each in results.checks] == [False, True, True]


def test_a_check_without_time_fails_and_a_timing_without_time_does_not(gpu_check):
    results = run(gpu_check, timed(kernel_toys.SCALE), seconds=0.0)
    assert (results.unchecked, results.untimed) == (["scale 1000 square=False"], ["scale big"])
    assert (results.checks, results.timings, results.exit_code) == ([], [], 1)
    assert gpu_check.report(results).splitlines()[-2:] == [
        "left out, no time: scale big",
        "FAILED, no time to check: scale 1000 square=False",
    ]
    large_only = replace(kernel_toys.SCALE, examples=lambda: timed(kernel_toys.SCALE).examples()[:1])
    assert run(gpu_check, large_only, seconds=0.0).exit_code == 0


def test_an_8_bit_type_is_checked_where_the_gpu_has_it_and_named_where_not(gpu_check):
    small = replace(ROW_NORM, examples=lambda: [each for each in ROW_NORM.examples() if not each.large])
    everything, without = run(gpu_check, small), run(gpu_check, small, float8=("float8_e5m2",))
    e4m3fn = {f"row_norm float8_e4m3fn {shape}" for shape in ("4x512", "6x100 scaled")}
    assert e4m3fn < {each.name for each in everything.checks}
    assert everything.unsupported == []
    assert set(without.unsupported) == e4m3fn
    assert {each.name for each in everything.checks} == {each.name for each in without.checks} | e4m3fn
    assert everything.exit_code == without.exit_code == 0
    assert "left out, this GPU lacks the data type: row_norm float8_e4m3fn 4x512" in gpu_check.report(without)
