"""Launches that are found out by running an operator whose launches only note themselves."""

import pytest
import torch

from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.recording import kernel_launches, record_launches
from kernel_toys import scale_kernel


def launch(dtype, *, out=None, square=False, elements=1000):
    x = torch.empty(elements, dtype=dtype, device="meta")
    scale_kernel[(1,)](x, x.to(out or dtype), elements, 0.5, SQUARE=square)


def test_launches_are_noted_and_not_made():
    recorded = record_launches(lambda: launch(torch.float32))
    assert [kernel for kernel, _ in recorded] == [scale_kernel]
    assert recorded[0][1]["num_elements"] == 1000
    assert record_launches(lambda: None) == []


def test_what_changes_the_binary_makes_a_launch_and_its_label():
    def calls():
        for elements in (1000, 7):
            launch(torch.float32, elements=elements)
        launch(torch.float32, square=True)
        launch(torch.bfloat16)
        launch(torch.bfloat16, out=torch.float32)

    recorded = record_launches(calls)
    found = kernel_launches(scale_kernel, recorded)
    assert [each.label for each in found] == [
        "float32",
        "float32 square",
        "bfloat16 out:bfloat16",
        "bfloat16 out:float32",
    ]
    assert [each.dtype for each in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert found[1].arguments["SQUARE"] is True


def test_only_the_launches_of_the_kernel_that_is_asked_for():
    recorded = record_launches(lambda: launch(torch.float32))
    assert kernel_launches(scale_kernel, [(object(), {}), *recorded])[0].label == "float32"


def test_after_an_error_launches_are_made_again(triton_cache):
    def fail():
        raise KeyError("no")

    with pytest.raises(KeyError):
        record_launches(fail)
    with target_driver("sm_90") as driver:
        launch(torch.float32)
        assert len(driver.launches) == 1
