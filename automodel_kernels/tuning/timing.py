"""How long a launch takes, within bounds on extra memory and on total time."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from automodel_kernels.hardware import can_measure, interpreter_enabled

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timed", "extra_memory_limit", "flush_bytes", "time_launch"]

# What a candidate may take: launches that do not count, then those that do, until the time is over.
WARM_UP_SECONDS = 0.02
MEASURED_SECONDS = 0.1
MOST_LAUNCHES = 100


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A measurement.

    Attributes:
        milliseconds: median of a launch.
        extra_bytes: memory that measuring took.
    """

    milliseconds: float
    extra_bytes: int = 0


def extra_memory_limit(device: torch.device) -> int | None:
    """Bytes that tuning may allocate on a device: an eighth of what is free. None where nothing is measured.

    What PyTorch's allocator holds unused counts as free: no other process can have it.
    """
    if not can_measure(device):
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) // 8


def flush_bytes(*, l2_bytes: int, limit: int) -> int:
    """The size of the buffer that is overwritten before a launch, so that it finds nothing of its data in the L2.

    It is twice the L2, or less if memory is short; below the size of the L2 it would not do its work, and is left out.

    Args:
        l2_bytes: size of the GPU's L2.
        limit: the most that it may take.
    """
    size = min(2 * l2_bytes, limit)
    return size if size >= l2_bytes else 0


def time_launch(launch: Callable[[], None], *, device: torch.device, most_bytes: int | None = None) -> Timed:
    """Times a launch: on a GPU by its events, under a target driver by that driver's timer, else by the clock.

    Args:
        launch: does it once; may be called up to 200 times.
        device: where its tensors are.
        most_bytes: extra memory that it may take on a GPU; the default is `extra_memory_limit`.
    """
    if can_measure(device):
        limit = extra_memory_limit(device) if most_bytes is None else most_bytes
        return _time_on_gpu(launch, device=device, limit=limit or 0)
    if not interpreter_enabled():
        (milliseconds,) = triton.runtime.driver.active.get_benchmarker()(launch, quantiles=(0.5,))
        return Timed(milliseconds=float(milliseconds))
    start = time.perf_counter()
    launch()
    return Timed(milliseconds=(time.perf_counter() - start) * 1e3)


def _time_on_gpu(launch: Callable[[], None], *, device: torch.device, limit: int) -> Timed:
    size = flush_bytes(l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size, limit=limit)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    launch()  # loads the binary
    torch.cuda.synchronize(device)
    _repeat(launch, buffer, device=device, seconds=WARM_UP_SECONDS)
    times = _repeat(launch, buffer, device=device, seconds=MEASURED_SECONDS)
    return Timed(milliseconds=statistics.median(times), extra_bytes=size)


def _repeat(launch: Callable[[], None], buffer: torch.Tensor, *, device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of launches, one at least, until the time is over; each finds a cold L2 if there is a buffer."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    batch = 1
    while not times or (len(times) < MOST_LAUNCHES and time.perf_counter() < deadline):
        start = time.perf_counter()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batch)]
        for before, after in events:
            if buffer.numel():
                buffer.zero_()
            before.record()
            launch()
            after.record()
        torch.cuda.synchronize(device)
        times += [before.elapsed_time(after) for before, after in events]
        # Several before the CPU waits again, as long as the time allows.
        each = (time.perf_counter() - start) / batch
        left = deadline - time.perf_counter()
        batch = max(1, min(int(left / each), MOST_LAUNCHES - len(times)))
    return times
