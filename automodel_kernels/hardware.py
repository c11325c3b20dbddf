"""What the kernels need to know about the machine: targets, present devices, the interpreter, and who runs a launch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = [
    "BOTH_FLOAT8",
    "TARGETS",
    "Device",
    "StandIn",
    "Target",
    "asked_tuning",
    "can_measure",
    "compiler_environment",
    "current_device",
    "current_target",
    "device_slug",
    "find_target",
    "interpreter_enabled",
    "launch_place",
    "present_device",
    "runs_triton",
    "stand_in",
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A family of GPUs that kernels are compiled for.

    Attributes:
        name: `sm_90` or the like; spaces and tables are keyed by it.
        backend: Triton's name of the vendor.
        arch: Triton's name of the architecture: 90, or `gfx942`.
        shared_memory: bytes of shared memory that one program can have.
        warp_size: threads in a warp.
        float8: names of the 8-bit torch dtypes that Triton loads, stores and converts there.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    shared_memory: int
    warp_size: int
    float8: tuple[str, ...]

    def gpu_target(self) -> Any:
        """Triton's own description, a `triton.backends.compiler.GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


E4M3FN, E5M2 = "float8_e4m3fn", "float8_e5m2"
BOTH_FLOAT8 = (E4M3FN, E5M2)
"""The names of the 8-bit torch dtypes that some target has."""

# The compute capability, as major * 10 + minor, from which NVIDIA's GPUs have e4m3fn; Triton refuses it below.
FIRST_WITH_E4M3FN = 89

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(name="sm_80", backend="cuda", arch=80, shared_memory=166_912, warp_size=32, float8=(E5M2,)),
        Target(name="sm_89", backend="cuda", arch=89, shared_memory=101_376, warp_size=32, float8=BOTH_FLOAT8),
        Target(name="sm_90", backend="cuda", arch=90, shared_memory=232_448, warp_size=32, float8=BOTH_FLOAT8),
        Target(name="sm_100", backend="cuda", arch=100, shared_memory=232_448, warp_size=32, float8=BOTH_FLOAT8),
        Target(name="gfx942", backend="hip", arch="gfx942", shared_memory=65_536, warp_size=64, float8=BOTH_FLOAT8),
    )
}
"""The targets that kernels are compiled and checked for, by name."""

# What the interpreter takes: it has no limits of its own, and every space names this target.
INTERPRETER_TARGET = "sm_90"

# The place of the interpreter's launches; GPUs have their index, and target drivers a number above.
INTERPRETER_PLACE = -1

_stand_in: StandIn | None = None


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        ValueError: there is none; names those there are.
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU of this machine.

    Attributes:
        name: as its driver reports it.
        capability: compute capability (major, minor); of an AMD GPU what PyTorch makes of its architecture.
        sm_count: number of multiprocessors (compute units).
        shared_memory: bytes of shared memory that one program can have.
        warp_size: threads in a warp.
        target: the target whose binaries' limits it keeps, with the device's own 8-bit types; see `nearest_target`.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_memory: int
    warp_size: int
    target: Target

    @property
    def slug(self) -> str:
        """The device's folder name."""
        return device_slug(self.name)


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What takes the place of this machine's GPUs while a target driver is active.

    Attributes:
        target: what launches are for.
        device: the GPU with its name, for its tuned winners; None where only the target is known.
        number: the driver's own device number.
    """

    target: Target
    device: Device | None
    number: int


def nearest_target(*, capability: tuple[int, int], shared_memory: int) -> Target:
    """The newest NVIDIA target that is no newer than a device and needs no more shared memory than it has.

    A device older than all that fit (8.6, with the shared memory of 8.9) gets the target with the least shared memory,
    without the 8-bit types that the device lacks.

    Args:
        capability: compute capability (major, minor).
        shared_memory: bytes that one program can have.
    """
    number = capability[0] * 10 + capability[1]
    nvidia = [target for target in TARGETS.values() if target.backend == "cuda"]
    fitting = [each for each in nvidia if int(each.arch) <= number and each.shared_memory <= shared_memory]
    if fitting:
        return max(fitting, key=lambda each: int(each.arch))
    smallest = min(nvidia, key=lambda each: each.shared_memory)
    if number < FIRST_WITH_E4M3FN:
        return replace(smallest, float8=tuple(name for name in smallest.float8 if name != E4M3FN))
    return smallest


@lru_cache
def present_device(index: int = 0) -> Device:
    """The properties of a GPU of this machine.

    Raises:
        RuntimeError: PyTorch sees no GPU of that index.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RuntimeError(f"device {index} is not there: PyTorch sees {torch.cuda.device_count()} GPUs")
    found = torch.cuda.get_device_properties(index)
    capability = (found.major, found.minor)
    hip = torch.version.hip is not None
    shared: int = found.shared_memory_per_block
    if not hip:
        # What a kernel may ask for; shared_memory_per_block is the 48 KiB it gets unasked.
        shared = getattr(found, "shared_memory_per_block_optin", shared)
    target = TARGETS["gfx942"] if hip else nearest_target(capability=capability, shared_memory=shared)
    return Device(
        name=found.name,
        capability=capability,
        sm_count=found.multi_processor_count,
        shared_memory=shared,
        warp_size=found.warp_size,
        target=target,
    )


def stand_in(value: StandIn | None) -> StandIn | None:
    """Makes launches on tensors of any device count as launches on another GPU; None ends that. Returns the former one.

    The target driver calls this; use that one.
    """
    global _stand_in
    former, _stand_in = _stand_in, value
    return former


def runs_triton(device: torch.device) -> bool:
    """Whether an operator launches its Triton kernels for tensors on a device, rather than its torch path.

    So it is on a GPU, under the interpreter, and under the target driver, which takes CPU and meta tensors too.
    """
    return device.type == "cuda" or _stand_in is not None or interpreter_enabled()


def current_target(device: torch.device) -> Target:
    """The target that a launch for tensors on a device is for.

    It is the target driver's while that is active, else the GPU's. The interpreter takes the choices of sm_90.

    Raises:
        RuntimeError: the device is no GPU of this machine, and neither driver nor interpreter stands in for one.
    """
    if _stand_in is not None:
        return _stand_in.target
    if device.type == "cuda":
        import torch

        return present_device(torch.cuda.current_device() if device.index is None else device.index).target
    if interpreter_enabled():
        return TARGETS[INTERPRETER_TARGET]
    raise RuntimeError(f"device {device} has no Triton target: it is no GPU, and TRITON_INTERPRET is not set")


def launch_place(device: torch.device) -> int:
    """A number for the place where a launch for tensors on a device goes: no two GPUs or target drivers share one."""
    if _stand_in is not None:
        return _stand_in.number
    index: int | None = device.index
    return INTERPRETER_PLACE if index is None else index


def current_device(device: torch.device) -> Device | None:
    """The GPU that a launch for tensors on a device is for; None under the interpreter and for a bare target."""
    if _stand_in is not None:
        return _stand_in.device
    return present_device(device.index) if device.type == "cuda" else None


def can_measure(device: torch.device) -> bool:
    """Whether launches for tensors on a device run on a GPU, so that their time says something."""
    return device.type == "cuda" and _stand_in is None


def asked_tuning() -> str | None:
    """What the environment variable AUTOMODEL_TUNING asks for; None if it is unset or empty."""
    return os.environ.get("AUTOMODEL_TUNING") or None


def compiler_environment(*, cache_dir: str | None, python_path: str) -> dict[str, str]:
    """The environment of a child process that compiles: this one's, without the interpreter.

    Args:
        cache_dir: Triton's cache folder there; None leaves it as it is.
        python_path: the child's PYTHONPATH.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = python_path
    if cache_dir is not None:
        environment["TRITON_CACHE_DIR"] = cache_dir
    return environment


def interpreter_enabled() -> bool:
    """Whether `@triton.jit` functions run in Triton's interpreter, on CPU tensors.

    Reads TRITON_INTERPRET at every call. Triton itself decides when a function is decorated, so the variable must be
    set before the first kernel is imported and stay as it is.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def device_slug(name: str) -> str:
    """The folder name of a device: lower-case letters, digits and single underscores.

    Args:
        name: the device's name as its driver reports it, for example `NVIDIA H200`, whose slug is `nvidia_h200`.

    Raises:
        ValueError: `name` holds no letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ValueError(f"name must hold an ASCII letter or digit, got {name!r}")
    return slug
