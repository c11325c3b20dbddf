import importlib.util
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kernel_toys
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
    broken = gpu_check.check(replace(kernel_toys.SCALE, run=lambda **_: 1 / 0), example, device)
    assert (right.passed, wrong.passed, broken.passed) == (True, False, False)
    assert wrong.error > 0.5
    assert broken.error == math.inf
    timing = gpu_check.Timing(name="scale big", milliseconds=2.0, floor=1.5, moved_bytes=8 * 10**9, flops=10**12)
    text = gpu_check.report([right, wrong, broken], [timing], ["scale huge"])
    assert "FAILED: output 0" in text
    assert "FAILED: ZeroDivisionError: division by zero" in text
    assert text.splitlines()[5].split()[-5:] == ["2.0000", "1.5000", "75%", "4000", "500.0"]
    assert text.endswith("left out, no time: scale huge")
