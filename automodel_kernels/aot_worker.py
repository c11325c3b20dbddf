"""The process behind `aot.compile_for`: reads a job from its input, forks once per request, writes the outcomes.

It has one thread, so that a fork is safe, and loads Triton and the kernels' modules once for all forks. Outcomes are
pickles of (index, outcome) on its output; whatever else is printed goes to its stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.compiler.compiler import make_backend

from automodel_kernels.aot import MOST_STDERR, Compiled, Job, Request, Resources
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.registry import Pointer

if TYPE_CHECKING:
    from typing import BinaryIO

    from automodel_kernels.hardware import Target

__all__ = ["main", "measure", "run_request"]


class _Address:
    """Looks to Triton like a tensor at an address, as its own mock for warming up does."""

    def __init__(self, pointer: Pointer) -> None:
        self.dtype = pointer.dtype
        self._address = 0 if pointer.aligned else 1

    def data_ptr(self) -> int:
        """Its address; only divisibility by 16 matters."""
        return self._address

    def ptr_range(self) -> int:
        """Fits in 32 bits, as all tensors below 2 GiB do."""
        return 0


def find_kernel(name: str) -> Any:
    """The `JITFunction` called `module:name`, without the decorators around it.

    Raises:
        ValueError: there is no such function.
    """
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    while found is not None and not isinstance(found, triton.runtime.JITFunction):
        found = getattr(found, "fn", None)
    if found is None:
        raise ValueError(f"kernel must name a @triton.jit function, got {name!r}")
    return found


def run_request(request: Request, *, target: Target, with_resources: bool) -> Compiled:
    """Compiles one request in this process, under the target driver."""
    kernel = find_kernel(request.kernel)
    arguments = {
        name: _Address(each) if isinstance(each, Pointer) else each for name, each in request.arguments.items()
    }
    triton.knobs.compilation.store_binary_only &= not with_resources  # AMD's resources stand in the assembly
    before = _processor_seconds()
    with target_driver(target) as driver:
        binary = kernel.run(grid=(1,), warmup=True, **arguments, **request.options)
    seconds = _processor_seconds() - before
    return Compiled(
        request=request,
        key=binary.hash,
        from_cache=driver.binaries[-1].from_cache,
        resources=measure(binary) if with_resources else None,
        cpu_seconds=seconds,
    )


def _processor_seconds() -> float:
    """Of this process and the ended programs that it started."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


def measure(binary: Any) -> Resources:
    """The resources of a compiled kernel, a `triton.compiler.CompiledKernel`.

    Raises:
        ValueError: the tools' output could not be read.
    """
    if "cubin" in binary.asm:
        registers, stack, spills = _cubin_resources(binary.asm["cubin"])
    else:
        registers, stack, spills = _amdgcn_resources(binary.asm["amdgcn"])
    columns = getattr(binary.metadata, "tmem_size", None) or 0
    return Resources(
        registers=registers,
        stack=stack,
        spills=spills,
        shared_memory=int(binary.metadata.shared),
        tensor_memory=int(columns),
    )


def _cubin_resources(cubin: bytes) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _tool("cuobjdump", "--dump-resource-usage", file.name)
        registers = [int(each) for each in re.findall(r"\bREG:(\d+)", text)]
        stack = [int(each) for each in re.findall(r"\bSTACK:(\d+)", text)]
        if not registers or not stack:
            raise ValueError(f"cuobjdump shows no REG and STACK: {text!r}")
        spills = 0
        if max(stack):
            spills = len(re.findall(r"\b(?:LDL|STL)\b", _tool("nvdisasm", "-c", file.name)))
    return max(registers), max(stack), spills


def _tool(name: str, *arguments: str) -> str:
    command = [getattr(triton.knobs.nvidia, name).path, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _amdgcn_resources(assembly: str) -> tuple[int, int, int]:
    def number(name: str) -> int:
        found = re.findall(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if not found:
            raise ValueError(f"the assembly's metadata holds no .{name}")
        return max(int(each) for each in found)

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), number("private_segment_fixed_size"), spills


def _compile_in_fork(target: Target, request: Request, *, job: Job, folder: Path) -> None:
    """The whole life of a fork; leaves its outcome and its output as files in `folder`."""
    os.setpgid(0, 0)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The default action of SIGALRM ends a process that is deep in the compiler, too.
    signal.setitimer(signal.ITIMER_REAL, job.timeout)
    try:
        outcome = run_request(request, target=target, with_resources=job.measure)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this request's failure
        traceback.print_exc()
        # The compiler shows the source first and says what is wrong with it last.
        lines = str(error).strip().splitlines() or [""]
        outcome = Compiled(request=request, error=f"{type(error).__name__}: {lines[-1]}")
    temporary = folder / "outcome.tmp"
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(folder / "outcome")


def _collect(request: Request, *, job: Job, folder: Path, status: int) -> Compiled:
    """The outcome of a fork that has ended."""
    try:
        stderr = (folder / "log").read_bytes()[-MOST_STDERR:].decode(errors="replace")
    except FileNotFoundError:
        stderr = ""
    try:
        outcome: Compiled = pickle.loads((folder / "outcome").read_bytes())
    except FileNotFoundError:
        code = os.waitstatus_to_exitcode(status)
        error = f"the compiler's process ended with status {code}"
        if code < 0:
            error = f"the compiler's process was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGALRM:
            error = f"took longer than {job.timeout:g} s"
        outcome = Compiled(request=request, error=error)
    return replace(outcome, stderr=stderr) if outcome.error else outcome


def _serve(job: Job, output: BinaryIO, *, folder: Path) -> None:
    """Keeps `job.jobs` forks running until every request has its outcome."""
    parent = os.getppid()
    waiting = list(enumerate(job.requests))[::-1]
    running: dict[int, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < job.jobs:
                index, (target, request) = waiting.pop()
                place = folder / str(index)
                place.mkdir()
                pid = os.fork()
                if pid == 0:
                    try:
                        _compile_in_fork(target, request, job=job, folder=place)
                    finally:
                        os._exit(0 if (place / "outcome").exists() else 1)
                # Both sides do it, since either may be first: from here on the fork can be ended with its children.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                running[pid] = index
            pid, status = os.wait()
            index = running.pop(pid)
            _end_group(pid)  # what a killed compiler had started
            outcome = _collect(job.requests[index][1], job=job, folder=folder / str(index), status=status)
            pickle.dump((index, outcome), output)
            output.flush()
            if os.getppid() != parent:
                return
    finally:
        for pid in running:
            _end_group(pid)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _load_modules(job: Job) -> None:
    """Does once what every fork would do: imports, and the hashes of Triton's files and of the assembler."""
    for target in {target.name: target for target, _ in job.requests}.values():
        make_backend(target.gpu_target()).hash()
    triton_key = getattr(triton.runtime.cache, "triton_key", None)
    if triton_key is not None:
        triton_key()  # remembers its result
    for name in {request.kernel.partition(":")[0] for _, request in job.requests}:
        # The fork that needs the module meets the same error and reports it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main() -> None:
    """Serves one job from standard input to standard output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with os.fdopen(os.dup(1), "wb") as output, tempfile.TemporaryDirectory(prefix="aot-") as folder:
        os.dup2(2, 1)
        job: Job = pickle.load(sys.stdin.buffer)
        _load_modules(job)
        _serve(job, output, folder=Path(folder))


if __name__ == "__main__":
    main()
