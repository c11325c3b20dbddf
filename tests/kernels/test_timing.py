import time

import pytest
import torch

from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.timing import extra_memory_limit, flush_bytes, time_launch
from kernel_toys import scale

CPU = torch.device("cpu")
MIB = 1 << 20

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("limit", "size"), [(200 * MIB, 120 * MIB), (100 * MIB, 100 * MIB), (60 * MIB, 60 * MIB), (59 * MIB, 0), (0, 0)]
)
def test_the_buffer_that_clears_the_l2_is_bounded_and_left_out_where_it_would_not_do(limit, size):
    assert flush_bytes(l2_bytes=60 * MIB, limit=limit) == size


@pytest.mark.usefixtures("triton_cache")
def test_the_target_drivers_timer_counts():
    x = torch.empty(10, device="meta")
    with target_driver("sm_90", timer=lambda record: record.arguments["factor"]) as driver:
        timed = time_launch(lambda: scale(x, factor=2.5), device=x.device)
        assert (timed.milliseconds, timed.extra_bytes, driver.measured) == (2.5, 0, 1)
        assert extra_memory_limit(x.device) is None


@pytest.mark.interpreter
def test_the_clock_counts_under_the_interpreter():
    calls = []

    def launch():
        calls.append(time.perf_counter())

    start = time.perf_counter()
    timed = time_launch(launch, device=CPU)
    assert len(calls) == 1
    assert 0 <= timed.milliseconds <= (time.perf_counter() - start) * 1e3


@needs_a_gpu
def test_a_gpu_is_measured_by_its_events_within_the_limit():
    x = torch.empty(64 * MIB, device="cuda")
    short = time_launch(lambda: x[:MIB].zero_(), device=x.device)
    long = time_launch(lambda: x.zero_(), device=x.device, most_bytes=0)
    assert 0 < short.milliseconds < long.milliseconds
    assert long.extra_bytes == 0
    assert 0 < short.extra_bytes <= extra_memory_limit(x.device) + short.extra_bytes // 8


@needs_a_gpu
def test_the_limit_is_an_eighth_of_what_is_free():
    free, total = torch.cuda.mem_get_info()
    assert free // 16 < extra_memory_limit(torch.device("cuda", 0)) <= total // 8
