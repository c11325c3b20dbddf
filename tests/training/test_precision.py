import re
from pathlib import Path

import pytest
import torch

from automodel.training.precision import autocast, compute_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("torch.float32", torch.float32),
    ],
)
def test_names(name, dtype):
    assert compute_dtype(name, device=CPU) == dtype


@pytest.mark.parametrize("name", ["float16", "int8", "", "BF16", "torch.torch.bf16"])
def test_an_unknown_name_is_refused(name):
    message = f"distributed.mp_policy.param_dtype must be one of ['bf16', 'bfloat16', 'float32', 'fp32'], got {name!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        compute_dtype(name, device=CPU)


def test_the_default_follows_the_hardware():
    cpu = Path("/proc/cpuinfo")
    fast = cpu.is_file() and "avx512_bf16" in cpu.read_text()
    expected = torch.bfloat16 if fast else torch.float32
    assert compute_dtype(None, device=CPU) == expected
    assert compute_dtype(None, device=torch.device("meta")) == torch.float32


def test_autocast_changes_the_dtype_of_products_only():
    a = torch.ones(2, 2)
    with autocast(torch.bfloat16, device=CPU):
        assert (a @ a).dtype == torch.bfloat16
        assert (a + a).dtype == torch.float32
    with autocast(torch.float32, device=CPU):
        assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32
