"""What a first step costs: binaries and CPU seconds of compiling for each registered operator; no GPU is needed.

Each operator runs in a process of its own, forward and backward on each of its large examples with an empty Triton
cache, for sm_90 under the target driver with the `static` policy. Then it runs again with another batch size and length
(the sizes of the first input's first two dimensions), for which nothing may be compiled or tuned. An operator that
needs values, which meta tensors lack, runs on its first small example. The same for one, with the audit's own reports:

    python bench/bench_cold_start.py row_norm
"""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from automodel_kernels.audit import ColdStartAudit
from automodel_kernels.hardware import compiler_environment
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import registry
from automodel_kernels.tuning.policy import tuning_policy

TARGET = "sm_90"
COLUMNS = ("operator", "example", "binaries", "CPU s", "tunings", "new in a second call")


def run(op, inputs):
    """The operator forwards and, where it differentiates, backwards."""
    inputs = {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
    wanted = [inputs[name].requires_grad_() for name in op.gradients if isinstance(inputs.get(name), torch.Tensor)]
    outputs = op.run(**inputs)
    if wanted:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.empty_like(each) for each in outputs], allow_unused=True)


def other_sizes(inputs):
    """The inputs with another batch size and length, repeated where they hold data."""
    first = next(each for each in inputs.values() if isinstance(each, torch.Tensor))
    batch, length = first.shape[:2]
    # The columns of a matrix stay a multiple of what they were, since alignment is a key; a length becomes ragged.
    new_length = 2 * length if first.ndim == 2 else 2 * length - 1

    def resized(tensor):
        if tensor.ndim > 1 and tensor.shape[:2] == (batch, length):
            return tensor.repeat(2, 2, *[1] * (tensor.ndim - 2))[:, :new_length].contiguous()
        if tensor.ndim and tensor.shape[0] == batch:
            return tensor.repeat(2, *[1] * (tensor.ndim - 1))
        return tensor

    return {name: resized(each) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


def measure(op, example, device):
    """The table's row for an example, and the audit."""
    audit = ColdStartAudit()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        # A driver of its own also makes Triton forget the binaries that this process has in memory.
        target_driver(TARGET),
        tuning_policy("static"),
        audit,
    ):
        patch.setenv("TRITON_CACHE_DIR", folder)
        run(op, example.inputs(device))
        first = audit.events
        audit.mark_warm()
        inputs = example.inputs(device)
        # Cumulated lengths fix batch size and length.
        packed = inputs.get("cu_seqlens") is not None
        run(op, inputs if packed else other_sizes(inputs))
    compiles = [event for event in first if event.kind == "compile"]
    row = {
        "operator": op.name,
        "example": example.label + ("" if device.type == "meta" else " (small)"),
        "binaries": len(compiles),
        "CPU s": round(sum(event.cpu_seconds or 0.0 for event in compiles), 2),
        "tunings": sum(event.kind == "tuning" for event in audit.events),
        "new in a second call": f"{len(audit.violations)}{' (same sizes)' if packed else ''}",
    }
    return row, audit


def measure_operator(name):
    """Rows and audits of an operator's large examples, or of its first small one."""
    op = registry.get(name)
    results = []
    for example in op.examples():
        if example.large:
            try:
                results.append(measure(op, example, torch.device("meta")))
            except ValueError as error:
                print(f"{name}, {example.label}: {error}", file=sys.stderr)
    return results or [measure(op, op.examples()[0], torch.device("cpu"))]


def measure_in_a_process(name):
    environment = compiler_environment(cache_dir=None, python_path=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, __file__, name, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def aligned(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("", aligned([COLUMNS, *([str(row[name]) for name in COLUMNS] for row in rows)]), sep="\n")


@pytest.mark.benchmark(group="cold start")
@pytest.mark.parametrize("name", [op.name for op in registry.load_all()])
def test_cold_start(benchmark, table, name):
    rows = benchmark.pedantic(measure_in_a_process, args=(name,), rounds=1)
    benchmark.extra_info.update(target=TARGET, rows=rows)
    table += rows
    for row in rows:
        assert row["binaries"] > 0, row
        assert (row["tunings"], row["new in a second call"].split()[0]) == (0, "0"), row


def main():
    name, *options = sys.argv[1:]
    registry.load_all()
    results = measure_operator(name)
    if "--json" in options:
        print(json.dumps([row for row, _ in results]))
        return
    for row, audit in results:
        print(f"{row['operator']}, {row['example']}\n{audit.table()}\n")
    print(aligned([COLUMNS, *([str(row[column]) for column in COLUMNS] for row, _ in results)]))


if __name__ == "__main__":
    main()
