"""Repair of 20 and of 16,384 rows of [151936, 4096] in bfloat16, beside a copy of the same rows.

With 20 rows the checks and the start of the work are what takes time, not the 320 kB.
"""

import time

import pytest
import torch

from automodel_kernels.row_repair import ROW_REPAIR, repair_rows_

ROWS, COLS, ROUNDS = 151_936, 4096, 5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=DEVICES)
def matrices(request):
    device = torch.device(request.param)
    generator = torch.Generator(device).manual_seed(0)
    # The weight is written only, and an untouched page of it takes no memory.
    source = torch.empty(ROWS, COLS, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    return torch.empty_like(source), source


@pytest.fixture
def one_thread():
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def seconds(call, device):
    """The least CPU seconds of some calls, or a GPU's median seconds."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, return_mode="median") / 1e3
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return min(taken)


@pytest.mark.benchmark(group="row repair")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("count", [20, 16_384])
def test_row_repair(benchmark, matrices, count):
    weight, source = matrices
    ids = torch.arange(count) * (ROWS // count)
    norms = torch.full((count,), COLS**0.5)
    arguments = (weight, source, ids, 1.0, norms)
    repair_rows_(*arguments)
    taken = seconds(lambda: repair_rows_(*arguments), weight.device)
    on_device = ids.to(weight.device)
    copy = seconds(lambda: weight.index_copy_(0, on_device, source.index_select(0, on_device)), weight.device)
    moved = ROW_REPAIR.cost(*arguments).moved_bytes
    results = {
        "bytes moved": moved,
        "seconds" if weight.is_cuda else "CPU seconds": round(taken, 6),
        "GB/s": round(moved / taken / 1e9, 2),
        "times a copy of the same rows": round(taken / copy, 2),
    }
    benchmark.extra_info.update(device=str(weight.device), **results)
    print(count, results)
    # The table's wall time.
    benchmark.pedantic(repair_rows_, args=arguments, rounds=1)
