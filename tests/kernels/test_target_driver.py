from dataclasses import replace

import pytest
import torch
import triton

import kernel_toys
from automodel_kernels.hardware import current_device, find_target, runs_triton
from automodel_kernels.target_driver import target_driver
from kernel_toys import scale, scale_kernel
from kernel_tuning import TOY_GPU

META = torch.device("meta")

pytestmark = pytest.mark.usefixtures("triton_cache")


def test_cpu_tensors_meta_tensors_and_bare_types_compile_one_binary():
    with target_driver("sm_90") as driver:
        scale(torch.ones(1000, dtype=torch.bfloat16), factor=0.5)
        scale(torch.empty(7, dtype=torch.bfloat16, device=META), factor=3.0)
        dtype = torch.bfloat16
        scale_kernel.fn.warmup(dtype, dtype, 5, 1.0, SQUARE=False, BLOCK=128, num_warps=1, num_stages=1, grid=(1,))
        assert [binary.name for binary in driver.compiled] == ["scale_kernel"]
        assert driver.compiled == driver.binaries
        first, second = driver.launches
        assert (first.name, first.grid, second.grid) == ("scale_kernel", (8, 1, 1), (1, 1, 1))
        assert first.arguments == {
            "x_ptr": dtype,
            "out_ptr": dtype,
            "num_elements": 1000,
            "factor": 0.5,
            "SQUARE": False,
            "BLOCK": 128,
        }


def test_every_target_and_a_second_driver_compile_anew_or_find_the_cache():
    keys = set()
    for target, from_cache in (("sm_90", False), ("gfx942", False), ("sm_90", True)):
        with target_driver(target) as driver:
            scale(torch.empty(8, device=META), factor=1.0)
        (binary,) = driver.binaries
        assert binary.from_cache is from_cache
        assert driver.compiled == ([] if from_cache else [binary])
        keys.add(binary.key)
    assert len(keys) == 2


def test_nothing_runs():
    x = torch.full((64,), 2.0)
    with target_driver("sm_80"):
        scale_kernel.fn[(1,)](x, x, 64, 5.0, SQUARE=False, BLOCK=64, num_warps=1)
    assert (x == 2).all()


def compile_and_fail():
    with target_driver("sm_90"):
        assert runs_triton(META)
        scale(torch.empty(8, dtype=torch.bfloat16, device=META), factor=1.0, square=True)
        raise ZeroDivisionError


def test_the_former_state_comes_back_after_an_error_too():
    config, knobs = triton.runtime.driver, triton.knobs.compilation
    seen = []

    def listener(**what):
        seen.append(what["cache_hit"])

    former = vars(config)["_active"]
    knobs.listener = listener
    try:
        with pytest.raises(ZeroDivisionError):
            compile_and_fail()
        assert knobs.listener is listener
    finally:
        knobs.listener = None
    assert seen == [False], "the former listener is told, too"
    assert vars(config)["_active"] is former
    assert not runs_triton(META)
    assert torch.equal(scale(torch.ones(2), factor=0.5), torch.full((2,), 0.5))


def test_measurements_for_tuning_are_counted():
    configs = [triton.Config({"BLOCK": block}, num_warps=1) for block in (64, 128)]
    tuned = triton.autotune(configs=configs, key=["SQUARE"])(scale_kernel.fn)
    x = torch.empty(256, device=META)
    with target_driver("sm_90") as driver:
        for count in (256, 100):
            tuned[(1,)](x, x, count, 1.0, SQUARE=False)
        assert driver.measured == 2
        assert len(driver.compiled) == 2
        assert len(driver.launches) == 4
        assert tuned.best_config is configs[0]


def test_a_kernel_that_needs_too_much_shared_memory_does_not_launch():
    x, out = torch.empty(0, dtype=torch.float16, device=META), torch.empty(0, device=META)
    small = replace(find_target("sm_89"), shared_memory=4096)
    with target_driver(small), pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        kernel_toys.greedy_kernel[(1,)](x, out, BLOCK=64, num_warps=4, num_stages=1)


def test_an_unknown_target_and_the_interpreter_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="got 'sm_1'"), target_driver("sm_1"):
        pass
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"), target_driver("sm_90"):
        pass


def test_it_stands_in_for_a_named_device_and_its_timer_is_asked():
    with target_driver(TOY_GPU, timer=lambda record: float(record.arguments["num_elements"])) as driver:
        assert current_device(META) is TOY_GPU
        assert driver.target is TOY_GPU.target
        measure = driver.get_benchmarker()
        x = torch.empty(6, device=META)
        assert measure(lambda: scale(x, factor=1.0), quantiles=(0.5, 0.2)) == [6.0, 6.0]
    with target_driver("sm_90") as driver:
        assert current_device(META) is None
