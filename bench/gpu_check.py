"""Every registered operator on this machine's GPU: correctness first, then time against its floor; a short table last.

    python bench/gpu_check.py [--only OP] [--seconds 200] [--json FILE]

Small examples are compared with the reference in float64. Large ones are timed (median of Triton's `do_bench`, which
clears the L2 cache) against the larger of two times: the bytes that must move at the bandwidth of a large copy, and
the matrix products at the rate of a large bfloat16 product, both measured here. Work that the time does not allow is
named as left out, and so are examples of an 8-bit data type that the GPU does not have. Ends with 1 if an error is
above its example's tolerance, an example fails, or the time did not allow a small one; with 0 where there is no GPU.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from automodel_kernels.hardware import BOTH_FLOAT8, present_device
from automodel_kernels.tuning import registry
from automodel_kernels.tuning.accuracy import example_errors

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What this GPU does at most: bytes and floating-point operations a second."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """A small example and the result with the largest error; or any example that failed, and why."""

    name: str
    worst: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A large example, forward or backward."""

    name: str
    milliseconds: float
    floor: float
    moved_bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a run found, and the names of what it left out: for lack of time, or of a data type."""

    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    untimed: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 0 if all(each.passed for each in self.checks) and not self.unchecked else 1


def floor_milliseconds(cost: registry.Cost, speed: Speed) -> float:
    return 1e3 * max(cost.moved_bytes / speed.bytes_per_second, cost.flops / speed.flops_per_second)


def median_milliseconds(call, device: torch.device) -> float:
    if device.type == "cpu":  # how this script itself is tested
        call()
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - started))
        return statistics.median(taken)
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def measure_speed(device: torch.device) -> Speed:
    source = torch.zeros(GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_milliseconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = median_milliseconds(lambda: a @ b, device)
    return Speed(bytes_per_second=2 * GIB / copy * 1e3, flops_per_second=2 * 8192**3 / product * 1e3)


def check(op: registry.Op, example: registry.Example, device: torch.device) -> Check:
    name = f"{op.name} {example.label}"
    errors = example_errors(op, example, device=device)
    worst = max(errors, key=lambda each: errors[each])
    return Check(name=name, worst=worst, error=errors[worst], tolerance=example.tolerance)


def failed(name: str, example: registry.Example, error: Exception) -> Check:
    return Check(name=name, worst=f"{type(error).__name__}: {error}", error=float("inf"), tolerance=example.tolerance)


def time_example(op: registry.Op, example: registry.Example, device: torch.device, speed: Speed):
    """Forward, and backward of an operator with gradients."""
    inputs = example.inputs(device)
    name = f"{op.name} {example.label}"
    cost = op.cost(**inputs)
    with torch.no_grad():
        yield timing(name, lambda: op.run(**inputs), cost, speed, device)
    if not op.gradients:
        return
    wanted = [inputs[each].requires_grad_() for each in op.gradients]
    outputs = op.run(**inputs)
    outputs = [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each.requires_grad]
    cotangents = [torch.randn_like(each) for each in outputs]
    backward = op.backward_cost(**inputs)
    yield timing(
        f"{name} backward",
        lambda: torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True),
        backward,
        speed,
        device,
    )


def timing(name: str, call, cost: registry.Cost, speed: Speed, device: torch.device) -> Timing:
    return Timing(
        name=name,
        milliseconds=median_milliseconds(call, device),
        floor=floor_milliseconds(cost, speed),
        moved_bytes=cost.moved_bytes,
        flops=cost.flops,
    )


def report(results: Results) -> str:
    """The table, as text."""
    lines = [f"{'correctness':<56}{'error':>10}{'allowed':>10}"]
    for each in results.checks:
        mark = "" if each.passed else f"  FAILED: {each.worst}"
        lines.append(f"{each.name:<56}{each.error:>10.1e}{each.tolerance:>10.1e}{mark}")
    lines.append(f"{'time':<56}{'ms':>10}{'floor ms':>10}{'of floor':>10}{'GB/s':>8}{'TFLOP/s':>9}")
    for each in results.timings:
        rate, flops = each.moved_bytes / each.milliseconds / 1e6, each.flops / each.milliseconds / 1e9
        share = f"{each.floor / each.milliseconds:.0%}"
        lines.append(
            f"{each.name:<56}{each.milliseconds:>10.4f}{each.floor:>10.4f}{share:>10}{rate:>8.0f}{flops:>9.1f}"
        )
    lines += [f"left out, this GPU lacks the data type: {name}" for name in results.unsupported]
    lines += [f"left out, no time: {name}" for name in results.untimed]
    return "\n".join([*lines, *(f"FAILED, no time to check: {name}" for name in results.unchecked)])


def lacks_data_type(example: registry.Example, float8) -> bool:
    """Whether an example has a tensor of 8-bit floats that are not among the names `float8`."""
    inputs = example.inputs(torch.device("meta")).values()
    found = {str(each.dtype).removeprefix("torch.") for each in inputs if isinstance(each, torch.Tensor)}
    return bool(found & set(BOTH_FLOAT8) - set(float8))


def run(ops, device: torch.device, *, speed: Speed, deadline: float, float8=BOTH_FLOAT8) -> Results:
    """All checks, then all timings, that begin before the deadline (of the monotonic clock)."""
    results = Results()
    examples = [(op, example) for op in ops for example in op.examples()]
    for op, example in sorted(examples, key=lambda each: each[1].large):
        name = f"{op.name} {example.label}"
        try:
            if time.monotonic() >= deadline:
                (results.untimed if example.large else results.unchecked).append(name)
            elif lacks_data_type(example, float8):
                results.unsupported.append(name)
            elif example.large:
                # Forward times stay where backward fails.
                results.timings.extend(time_example(op, example, device, speed))
            else:
                results.checks.append(check(op, example, device))
        except Exception as error:  # noqa: BLE001 - one broken operator must not hide the others' results
            results.checks.append(failed(name, example, error))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="OP", help="this operator only")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin nothing after so many")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    ops = registry.load_all()
    if options.only:
        ops = (registry.get(options.only),)
    if not torch.cuda.is_available():
        print(f"no GPU is here: {len(ops)} operators were neither checked nor timed")
        return 0
    gpu = present_device()
    device, deadline = torch.device("cuda"), time.monotonic() + options.seconds
    speed = measure_speed(device)
    results = run(ops, device, speed=speed, deadline=deadline, float8=gpu.target.float8)
    if options.json is not None:
        content = {"device": gpu.name, "speed": asdict(speed), **asdict(results)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{gpu.name}, {gpu.sm_count} SMs, {gpu.shared_memory} B shared memory, space {gpu.target.name}")
    print(f"copies {speed.bytes_per_second / 1e12:.2f} TB/s, bfloat16 {speed.flops_per_second / 1e12:.0f} TFLOP/s")
    print(report(results))
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
