"""Every registered operator on this machine's GPU: correctness first, then time against its floor; a short table last.

    python bench/gpu_check.py [--only OP] [--seconds 200] [--json FILE]

Small examples are compared with the reference in float64. Large ones are timed (median of Triton's `do_bench`, which
clears the L2 cache) against the larger of two times: the bytes that must move at the bandwidth of a large copy, and
the matrix products at the rate of a large bfloat16 product, both measured here. Ends with 1 if an error is above its
example's tolerance, and with 0 where there is no GPU. Work that the time does not allow is named as left out.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from automodel_kernels.hardware import present_device
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
    """A small example: the result with the largest error, as a share of the tolerance."""

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


def floor_milliseconds(cost: registry.Cost, speed: Speed) -> float:
    return 1e3 * max(cost.moved_bytes / speed.bytes_per_second, cost.flops / speed.flops_per_second)


def median_milliseconds(call) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def measure_speed(device: torch.device) -> Speed:
    source = torch.zeros(GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = median_milliseconds(lambda: a @ b)
    return Speed(bytes_per_second=2 * GIB / copy * 1e3, flops_per_second=2 * 8192**3 / product * 1e3)


def check(op: registry.Op, example: registry.Example, device: torch.device) -> Check:
    name = f"{op.name} {example.label}"
    try:
        errors = example_errors(op, example, device=device)
    except Exception as error:  # noqa: BLE001 - one broken operator must not hide the others' results
        return Check(
            name=name, worst=f"{type(error).__name__}: {error}", error=float("inf"), tolerance=example.tolerance
        )
    worst = max(errors, key=lambda each: errors[each])
    return Check(name=name, worst=worst, error=errors[worst], tolerance=example.tolerance)


def time_example(op: registry.Op, example: registry.Example, device: torch.device, speed: Speed):
    """Forward, and backward of an operator with gradients."""
    inputs = example.inputs(device)
    name = f"{op.name} {example.label}"
    cost = op.cost(**inputs)
    with torch.no_grad():
        yield timing(name, lambda: op.run(**inputs), cost, speed)
    if not op.gradients:
        return
    wanted = [inputs[each].requires_grad_() for each in op.gradients]
    outputs = op.run(**inputs)
    outputs = [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each.requires_grad]
    cotangents = [torch.randn_like(each) for each in outputs]
    backward = op.backward_cost(**inputs)
    yield timing(
        f"{name} backward", lambda: torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True), backward, speed
    )


def timing(name: str, call, cost: registry.Cost, speed: Speed) -> Timing:
    return Timing(
        name=name,
        milliseconds=median_milliseconds(call),
        floor=floor_milliseconds(cost, speed),
        moved_bytes=cost.moved_bytes,
        flops=cost.flops,
    )


def report(checks, timings, left_out) -> str:
    """The table, as text."""
    lines = [f"{'correctness':<56}{'error':>10}{'allowed':>10}"]
    for each in checks:
        mark = "" if each.passed else f"  FAILED: {each.worst}"
        lines.append(f"{each.name:<56}{each.error:>10.1e}{each.tolerance:>10.1e}{mark}")
    lines.append(f"{'time':<56}{'ms':>10}{'floor ms':>10}{'of floor':>10}{'GB/s':>8}{'TFLOP/s':>9}")
    for each in timings:
        rate, flops = each.moved_bytes / each.milliseconds / 1e6, each.flops / each.milliseconds / 1e9
        share = f"{each.floor / each.milliseconds:.0%}"
        lines.append(
            f"{each.name:<56}{each.milliseconds:>10.4f}{each.floor:>10.4f}{share:>10}{rate:>8.0f}{flops:>9.1f}"
        )
    return "\n".join([*lines, *(f"left out, no time: {name}" for name in left_out)])


def run(ops, device: torch.device, seconds: float):
    """All checks, then all timings that begin within the time; gives them, the speed and what was left out."""
    deadline = time.monotonic() + seconds
    checks, timings, left_out = [], [], []
    examples = [(op, example) for op in ops for example in op.examples()]
    speed = measure_speed(device)
    for op, example in sorted(examples, key=lambda each: each[1].large):
        if time.monotonic() > deadline:
            left_out.append(f"{op.name} {example.label}")
        elif example.large:
            timings += time_example(op, example, device, speed)
        else:
            checks.append(check(op, example, device))
    return speed, checks, timings, left_out


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
    speed, checks, timings, left_out = run(ops, torch.device("cuda"), options.seconds)
    if options.json is not None:
        rows = {"checks": [asdict(each) for each in checks], "timings": [asdict(each) for each in timings]}
        options.json.write_text(json.dumps({"device": gpu.name, "speed": asdict(speed), **rows}, indent=1) + "\n")
    print(f"{gpu.name}, {gpu.sm_count} SMs, {gpu.shared_memory} B shared memory, space {gpu.target.name}")
    print(f"copies {speed.bytes_per_second / 1e12:.2f} TB/s, bfloat16 {speed.flops_per_second / 1e12:.0f} TFLOP/s")
    print(report(checks, timings, left_out))
    return 0 if all(each.passed for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
