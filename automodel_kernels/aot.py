"""Compiling kernels ahead of time, for a GPU that need not be here, into a Triton cache that a later launch hits.

    requests = [request for op in load_all() for request in op_requests(op, find_target("sm_90"))]
    results = compile_for("sm_90", requests, cache_dir=Path("cache"))

Every request is compiled in a process of its own, forked from one that has Triton and the kernels' modules loaded: a
compiler that aborts costs one request. The fork goes through `JITFunction.run` under the target driver, so the keys are
those of an ordinary launch with the same Triton, Python minor version and compiler settings in the environment.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from automodel_kernels.hardware import Target, compiler_environment, find_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from automodel_kernels.tuning.candidates import Config
    from automodel_kernels.tuning.registry import Kernel, Launch, Op

__all__ = [
    "Compiled",
    "Job",
    "Request",
    "Resources",
    "compile_for",
    "compile_pairs",
    "launch_request",
    "op_requests",
    "usable_cores",
]

MOST_STDERR = 8_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """One binary to compile.

    Attributes:
        kernel: the `@triton.jit` function as `module:name`; the module must be importable in another process.
        arguments: by name: `Pointer` for a tensor, and the values of all other arguments, constexprs included.
        options: the configuration: tuned constexprs, `num_warps`, `num_stages`.
        label: names it for people; compiling ignores it.
    """

    kernel: str
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one binary takes of a GPU.

    Attributes:
        registers: a thread.
        stack: bytes a thread in local memory; spilled registers lie there.
        spills: on NVIDIA the load and store instructions to local memory, on AMD the registers spilled.
        shared_memory: bytes a program.
        tensor_memory: columns of Blackwell's tensor memory a program; 0 elsewhere.
    """

    registers: int
    stack: int
    spills: int
    shared_memory: int
    tensor_memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The outcome of one request.

    Attributes:
        request: what was asked.
        key: Triton's cache key; empty if it failed.
        from_cache: whether it was there already.
        resources: what the binary takes; None if it failed or was not to be measured.
        cpu_seconds: processor time of the compilation, of the programs that the compiler started too.
        error: empty, or in a line why it failed.
        stderr: the end of what the compiler wrote.
    """

    request: Request
    key: str = ""
    from_cache: bool = False
    resources: Resources | None = None
    cpu_seconds: float = 0.0
    error: str = ""
    stderr: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the compiling process is told.

    Attributes:
        requests: all of them, each with its GPU.
        jobs: how many to compile at a time.
        timeout: seconds after which a request has failed.
        measure: whether to find out the resources.
    """

    requests: tuple[tuple[Target, Request], ...]
    jobs: int
    timeout: float
    measure: bool


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def launch_request(kernel: Kernel, launch: Launch, config: Config, *, label: str = "") -> Request:
    """The request for one launch of a kernel in one configuration."""
    function = kernel.function
    while not hasattr(function, "arg_names") and hasattr(function, "fn"):
        function = function.fn
    name = f"{function.fn.__module__}:{function.fn.__qualname__}"
    return Request(kernel=name, arguments=launch.arguments, options=config.options, label=label)


def op_requests(op: Op, target: Target, *, configs: Literal["all", "default"] = "default") -> list[Request]:
    """The requests of every launch that an operator's spaces claim on a target.

    Args:
        op: the operator.
        target: the GPU.
        configs: every configuration, or the static choice only.
    """
    requests = []
    for kernel in op.kernels:
        for launch, found in kernel.claimed(target):
            for config in found.configs if configs == "all" else found.configs[:1]:
                label = f"{op.name}/{kernel.name} {launch.label}, {config.label}"
                requests.append(launch_request(kernel, launch, config, label=label))
    return requests


def compile_for(
    target: Target | str,
    requests: Sequence[Request],
    *,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    timeout: float = 600.0,
    measure: bool = True,
    progress: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compiles binaries for a GPU that need not be here, and leaves them in a Triton cache.

    Args:
        target: the GPU, or its target's name.
        requests: what to compile.
        jobs: how many at a time; by default one per usable core.
        cache_dir: the cache's folder; by default Triton's own (TRITON_CACHE_DIR).
        timeout: seconds after which a single request has failed.
        measure: whether to find out the resources that each binary takes.
        progress: called with each outcome when it is there, in the order in which they come.

    Returns:
        The outcomes in the order of the requests. A request that fails is an outcome with an error.

    Raises:
        ValueError: no target has that name, or `jobs` is not positive.
        RuntimeError: the compiling process itself failed; holds the end of its output.
    """
    target = find_target(target) if isinstance(target, str) else target
    pairs = [(target, request) for request in requests]
    return compile_pairs(pairs, jobs=jobs, cache_dir=cache_dir, timeout=timeout, measure=measure, progress=progress)


def compile_pairs(
    pairs: Sequence[tuple[Target, Request]],
    *,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    timeout: float = 600.0,
    measure: bool = True,
    progress: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compiles binaries for several GPUs at once; otherwise as `compile_for`.

    Args:
        pairs: what to compile, and for which GPU.
        jobs: see `compile_for`, like all further arguments, the result and the errors.
    """
    jobs = usable_cores() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")
    if not pairs:
        return []
    job = Job(requests=tuple(pairs), jobs=jobs, timeout=timeout, measure=measure)
    environment = compiler_environment(
        cache_dir=None if cache_dir is None else str(cache_dir), python_path=os.pathsep.join(filter(None, sys.path))
    )
    outcomes: dict[int, Compiled] = {}
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "automodel_kernels.aot_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
        with process:
            try:
                _send(process, job)
                for index, outcome in _received(process):
                    outcomes[index] = outcome
                    if progress is not None:
                        progress(outcome)
            except BaseException:
                process.terminate()
                raise
        if process.returncode != 0 or len(outcomes) < len(pairs):
            stderr.seek(0)
            text = stderr.read()[-MOST_STDERR:].decode(errors="replace")
            raise RuntimeError(f"the compiling process ended with status {process.returncode}; its output:\n{text}")
    return [outcomes[index] for index in range(len(pairs))]


def _send(process: subprocess.Popen[bytes], job: Job) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(job, process.stdin)
        process.stdin.close()
    except BrokenPipeError:
        return  # its status and output say more


def _received(process: subprocess.Popen[bytes]) -> Iterator[tuple[int, Compiled]]:
    assert process.stdout is not None
    while True:
        try:
            yield pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            return
