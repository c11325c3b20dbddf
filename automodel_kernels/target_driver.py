"""A Triton driver for a GPU that is not here: it compiles for real, launches nothing, and keeps count.

    with target_driver("sm_90") as driver:
        row_squared_norms(torch.empty(64, 1000, dtype=torch.bfloat16, device="meta"))
    assert [binary.name for binary in driver.compiled] == ["row_squared_norms_kernel"]

While it is active every operator of ours takes its Triton path, with CPU tensors, meta tensors, or bare dtypes in a
launch of its own. Outputs hold whatever their memory held. Binaries go to Triton's cache under the keys of an ordinary
launch on such a GPU. Triton's interface for drivers is `triton.backends.driver.DriverBase`.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.driver import DriverBase

from automodel_kernels.hardware import Device, StandIn, Target, find_target, interpreter_enabled, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Binary", "LaunchRecord", "TargetDriver", "target_driver"]

# Triton keeps binaries in memory by device number, together with the target it saw there first. A number of its own
# for every driver gives each a clean memory; real devices count from 0.
_device_numbers = itertools.count(1_000_000)

MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class Binary:
    """A kernel that Triton compiled or found in its cache.

    Attributes:
        name: the kernel function's name.
        key: Triton's cache key.
        from_cache: whether it was found.
        shared_memory: bytes it needs.
    """

    name: str
    key: str
    from_cache: bool
    shared_memory: int


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch that did not happen.

    Attributes:
        name: the kernel function's name.
        grid: its three numbers of programs.
        arguments: by name, constexprs too, as they were passed; of a tensor its dtype.
    """

    name: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class TargetDriver(DriverBase):  # type: ignore[misc]
    """Stands in for the driver of a GPU; see the module. Use `target_driver`, which makes it active and ends it.

    Attributes:
        target: the GPU.
        binaries: what was compiled or found, in order; a second launch with the same key adds nothing.
        launches: what was launched, in order.
        measured: how many times a configuration was measured for tuning.
    """

    def __init__(self, target: Target, *, timer: Callable[[LaunchRecord], float] | None = None) -> None:
        super().__init__()
        self.target = target
        self._timer = timer
        self.binaries: list[Binary] = []
        self.launches: list[LaunchRecord] = []
        self.measured = 0
        self.utils = _Utilities(target)
        self.launcher_cls = self._launcher
        self._device = next(_device_numbers)

    @property
    def compiled(self) -> list[Binary]:
        """The binaries that were compiled, not found."""
        return [binary for binary in self.binaries if not binary.from_cache]

    @classmethod
    def is_active(cls) -> bool:
        """False: Triton must not choose this driver by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing here has a C++ side.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"the target driver makes no C++ launcher, and so has no C++ type for {ty}")

    def get_current_target(self) -> Any:
        """The GPU in Triton's terms."""
        return self.target.gpu_target()

    def get_current_device(self) -> int:
        """A number that no other driver and no GPU has."""
        return self._device

    def set_current_device(self, device: int) -> None:
        """Nothing: there is one device."""

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where Triton's own scratch tensors go."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """A measurement that calls once, counts, and takes what the timer says.

        Without a timer every launch takes one millisecond, and so the first configuration wins.
        """

        def measure(call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_settings: Any) -> list[float]:
            self.measured += 1
            call()
            milliseconds = 1.0 if self._timer is None else self._timer(self.launches[-1])
            return [milliseconds] * len(quantiles)

        return measure

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """An empty tensor: there is no cache to clear."""
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Nothing."""

    def note_binary(self, *, src: Any, metadata: dict[str, Any], cache_hit: bool) -> None:
        """Adds to `binaries`; Triton's compilation listener calls it."""
        self.binaries.append(
            Binary(
                name=str(metadata["name"]),
                key=str(metadata["hash"]),
                from_cache=cache_hit,
                shared_memory=int(metadata["shared"]),
            )
        )

    def _launcher(self, src: Any, metadata: Any) -> Callable[..., None]:
        names = src.fn.arg_names

        def launch(*values: Any) -> None:
            # Triton's own values come first, and their number differs among its versions.
            grid = (int(values[0]), int(values[1]), int(values[2]))
            given = zip(names, values[len(values) - len(names) :], strict=True)
            arguments = {name: each.dtype if hasattr(each, "data_ptr") else each for name, each in given}
            self.launches.append(LaunchRecord(name=src.fn.__name__, grid=grid, arguments=arguments))

        return launch


class _Utilities:
    """What Triton asks a driver's `utils` for, before it launches."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The limits that Triton checks a binary against."""
        return {"max_shared_mem": self._target.shared_memory, "warpSize": self._target.warp_size}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[str, str, int, int, int]:
        """No module, the kernel's name as its function, no registers, no spills, and the most threads a GPU allows."""
        return name, name, 0, 0, MOST_THREADS

    def unload_module(self, module: str) -> None:
        """Nothing."""


@contextmanager
def target_driver(
    target: Target | Device | str, *, timer: Callable[[LaunchRecord], float] | None = None
) -> Iterator[TargetDriver]:
    """Makes a driver for a GPU that is not here the active one, and restores the former one at the end.

    One at a time in a process, and in one thread.

    Args:
        target: the GPU's target, or that one's name, or the very device, whose tuned winners launches then take.
        timer: the milliseconds that a launch takes where configurations are measured; one for each by default.

    Raises:
        ValueError: no target has that name.
        RuntimeError: kernels run in the interpreter in this process.
    """
    if interpreter_enabled():
        raise RuntimeError("TRITON_INTERPRET is set: kernels of this process are interpreted and cannot be compiled")
    device = target if isinstance(target, Device) else None
    if isinstance(target, str):
        target = find_target(target)
    driver = TargetDriver(target.target if isinstance(target, Device) else target, timer=timer)
    config = triton.runtime.driver
    knobs = triton.knobs.compilation
    # Reading `active` would look for a GPU's driver, and fail where there is none.
    former_driver, former_listener = vars(config).get("_active"), knobs.listener
    number = driver.get_current_device()
    former_stand_in = stand_in(StandIn(target=driver.target, device=device, number=number))

    def listen(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **more: Any) -> None:
        driver.note_binary(src=src, metadata=metadata, cache_hit=cache_hit)
        if former_listener is not None:
            former_listener(src=src, metadata=metadata, cache_hit=cache_hit, **more)

    try:
        config.set_active(driver)
        knobs.listener = listen
        yield driver
    finally:
        stand_in(former_stand_in)
        knobs.listener = former_listener
        config.set_active(former_driver)
