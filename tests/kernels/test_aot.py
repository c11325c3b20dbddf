import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch

import kernel_stub_cuda
import kernel_toys
from automodel_kernels.aot import Request, compile_for, op_requests, usable_cores
from automodel_kernels.hardware import find_target
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.registry import Pointer

FLOAT = Pointer(dtype=torch.float32)


def crash(code, **options):
    return Request(kernel="kernel_toys:crash_kernel", arguments={"x_ptr": FLOAT, "CODE": code}, options=options)


def test_requests_hold_every_claimed_launch_in_its_configurations():
    target = find_target("sm_90")
    every = op_requests(kernel_toys.SCALE, target, configs="all")
    assert [request.label for request in every[:3]] == [
        "scale/scale_kernel float32, BLOCK=128 warps=1 stages=1",
        "scale/scale_kernel float32 square, BLOCK=256 warps=2 stages=1",
        "scale/scale_kernel float32 square, BLOCK=1024 warps=4 stages=1",
    ]
    assert every[0].kernel == "kernel_toys:scale_kernel"
    assert len(every) == 6
    assert op_requests(kernel_toys.SCALE, target) == [every[0], every[1], every[3], every[4]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache folder, and the outcomes of the toy's launches, and of an unaligned one of another kernel."""
    folder, target = tmp_path_factory.mktemp("compiled"), find_target("sm_90")
    requests = op_requests(kernel_toys.SCALE, target)
    unaligned = Pointer(dtype=torch.float32, aligned=False)
    requests.append(Request(kernel="kernel_toys:crash_kernel", arguments={"x_ptr": unaligned, "CODE": 0}))
    progress = []
    outcomes = compile_for(target, requests, jobs=2, cache_dir=folder, progress=progress.append)
    assert [outcome.request for outcome in outcomes] == requests
    assert {outcome.key for outcome in progress} == {outcome.key for outcome in outcomes}
    return folder, outcomes


def test_outcomes_hold_key_resources_and_time(compiled):
    _, outcomes = compiled
    assert len({outcome.key for outcome in outcomes}) == 5
    for outcome in outcomes:
        assert (outcome.error, outcome.stderr, outcome.from_cache) == ("", "", False)
        assert outcome.resources.registers > 0
        assert outcome.resources.stack == outcome.resources.spills == 0
        assert outcome.cpu_seconds > 0


def test_what_was_compiled_is_found_by_a_launch(compiled, monkeypatch):
    folder, outcomes = compiled
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    tokens, x = torch.empty(12, dtype=torch.bfloat16, device="meta"), torch.zeros(65)
    with target_driver("sm_90") as driver:
        kernel_toys.scale(tokens, factor=1.0)
        kernel_toys.scale(tokens, factor=1.0, square=True)
        for out in (x[1:], x):
            kernel_toys.crash_kernel[(1,)](out, CODE=0)
    *found, aligned = driver.binaries
    assert [binary.key for binary in found] == [outcome.key for outcome in outcomes[2:]]
    assert all(binary.from_cache for binary in found)
    assert not aligned.from_cache, "alignment is part of the key"


def test_a_crash_a_hang_or_an_error_is_one_failed_request(triton_cache):
    target = find_target("sm_89")
    requests = [crash(1), crash(2), crash(3), crash(0), crash(0, num_wraps=4)]
    requests += [Request(kernel=name, arguments={}) for name in ("kernel_toys:SCALE", "no_such_module:kernel")]
    requests += op_requests(kernel_toys.greedy_op(block=64, num_warps=4), target) + requests[3:4]
    aborted, hung, raised, fine, unknown, no_kernel, no_module, greedy, again = compile_for(
        target, requests, jobs=2, cache_dir=triton_cache, timeout=10.0
    )
    assert aborted.error == "the compiler's process was ended by SIGABRT"
    assert "last words of the compiler" in aborted.stderr
    assert hung.error == "took longer than 10 s"
    assert raised.error == "ValueError: the reason"
    assert "the source" in raised.stderr
    assert (fine.error, fine.stderr) == ("", "")
    assert "num_wraps" in unknown.error
    assert "kernel must name a @triton.jit function, got 'kernel_toys:SCALE'" in no_kernel.error
    assert "No module named 'no_such_module'" in no_module.error
    assert all(outcome.resources is None for outcome in (aborted, hung, raised, unknown, no_kernel, no_module))
    assert (again.key, again.from_cache) == (fine.key, True)
    assert greedy.resources.stack > 0
    assert greedy.resources.spills > 0
    assert greedy.resources.shared_memory >= 2 * 64 * 64 * 2


def test_senseless_calls_are_refused():
    with pytest.raises(ValueError, match="got 'sm_1'"):
        compile_for("sm_1", [crash(0)])
    with pytest.raises(ValueError, match="jobs must be positive, got 0"):
        compile_for("sm_90", [crash(0)], jobs=0)
    assert compile_for("sm_90", []) == []


def test_a_compiling_process_that_cannot_start_is_an_error_with_its_output(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('this is no triton')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 1; its output:.*this is no triton"):
        compile_for("sm_90", [crash(0)], cache_dir=tmp_path / "cache")


STARTS_A_HANG = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2].split(":")
from automodel_kernels.aot import Request, compile_for
from automodel_kernels.tuning.registry import Pointer
from kernel_toys import torch
pointer = Pointer(dtype=torch.float32)
name = "kernel_toys:crash_kernel"
requests = [Request(kernel=name, arguments={"x_ptr": pointer, "CODE": code}) for code in (0, 2)]
compile_for("sm_90", requests, jobs=1, cache_dir=Path(sys.argv[1]), progress=lambda _: print("going", flush=True))
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ending_the_caller_ends_the_compilers(tmp_path):
    command = [sys.executable, "-c", STARTS_A_HANG, str(tmp_path), os.pathsep.join(sys.path)]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout.readline() == "going\n"
        (worker,) = children(caller.pid)
        deadline = time.monotonic() + 60
        while not (forks := children(worker)) and time.monotonic() < deadline:
            time.sleep(0.01)
        caller.send_signal(signal.SIGINT)
        assert caller.wait(timeout=60) != 0
        while any(map(is_running, [worker, *forks])) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_running, [worker, *forks]))
    finally:
        caller.kill()
        caller.wait()
        caller.stdout.close()


def stub_is_missing():
    if shutil.which("gcc") is None:
        return "gcc is missing"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python.h is missing"
    return ""


@pytest.mark.skipif(bool(stub_is_missing()), reason=stub_is_missing())
def test_an_ordinary_launch_through_tritons_cuda_driver_hits_what_was_compiled(compiled, tmp_path):
    folder, outcomes = compiled
    kernel_stub_cuda.build_stub(tmp_path / "stub")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "LD_LIBRARY_PATH": str(tmp_path / "stub"),
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, kernel_stub_cuda.__file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["launches"] == 3
    _, float32, _, bfloat16, _ = outcomes
    assert seen["binaries"] == [[bfloat16.key, True], [float32.key, True]]


def test_the_default_number_of_jobs_is_what_this_process_may_use():
    assert usable_cores() == len(os.sched_getaffinity(0))
