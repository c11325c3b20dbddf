"""Counts what kernels load and store under Triton's interpreter.

with record_traffic() as launches:
    row_squared_norms(x)
assert launches[0].loads.distinct_bytes == x.numel() * x.element_size()
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LaunchTraffic", "Traffic", "record_traffic"]


@dataclass(kw_only=True)
class Traffic:
    """One direction of one launch.

    Attributes:
        operations: `tl.load` or `tl.store` calls, over all programs.
        requested_bytes: of all elements that their masks let through, each as often as it was asked for.
    """

    operations: int = 0
    requested_bytes: int = 0
    _addresses: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def note(self, pointers: Any, mask: np.ndarray | None) -> None:
        """Adds one operation on a tile of pointers."""
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data, dtype=np.uint64)
        if mask is not None:
            addresses, mask = np.broadcast_arrays(addresses, mask)
            addresses = addresses[mask.astype(bool)]
        self.operations += 1
        self.requested_bytes += addresses.size * itemsize
        self._addresses.setdefault(itemsize, []).append(np.unique(addresses))

    def distinct_in(self, start: int, stop: int) -> int:
        """The number of different bytes with an address from `start` to before `stop`."""
        touched = self._bytes()
        return int(((touched >= start) & (touched < stop)).sum())

    @property
    def distinct_bytes(self) -> int:
        """The number of different bytes."""
        return int(self._bytes().size)

    def _bytes(self) -> np.ndarray:
        parts = [np.empty(0, dtype=np.uint64)]
        for itemsize, addresses in self._addresses.items():
            starts = np.unique(np.concatenate(addresses))
            parts.append((starts[:, None] + np.arange(itemsize, dtype=np.uint64)).ravel())
        return np.unique(np.concatenate(parts))


@dataclass(kw_only=True)
class LaunchTraffic:
    """One launch. Atomic operations count as a load and a store.

    Attributes:
        name: the kernel function's name.
        loads: what it read.
        stores: what it wrote.
        spans: addresses (start, stop) of the storage of each tensor argument, by name.
    """

    name: str
    loads: Traffic = field(default_factory=Traffic)
    stores: Traffic = field(default_factory=Traffic)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    def loaded(self, argument: str) -> int:
        """Different bytes that were read from the storage of a tensor argument."""
        return self.loads.distinct_in(*self.spans[argument])

    def stored(self, argument: str) -> int:
        """Different bytes that were written to the storage of a tensor argument."""
        return self.stores.distinct_in(*self.spans[argument])


@contextmanager
def record_traffic() -> Iterator[list[LaunchTraffic]]:
    """Gives a list that grows by one entry per launch under the interpreter, on CPU tensors."""
    launches: list[LaunchTraffic] = []
    builder = interpreter.InterpreterBuilder
    load, store, run = builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def recorded_run(executor: Any, *arguments: Any, **options: Any) -> Any:
        launch = LaunchTraffic(name=executor.fn.__name__)
        named = dict(zip(executor.arg_names, arguments, strict=False)) | options
        for name, each in named.items():
            if hasattr(each, "untyped_storage"):
                storage = each.untyped_storage()
                launch.spans[name] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        launches.append(launch)
        return run(executor, *arguments, **options)

    def recorded_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        launches[-1].loads.note(pointers, mask.data)
        return load(self, pointers, mask, *more)

    def recorded_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        launches[-1].stores.note(pointers, mask.data)
        return store(self, pointers, value, mask, *more)

    def recorded_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        launches[-1].loads.note(pointers, mask.data)
        launches[-1].stores.note(pointers, mask.data)
        return rmw(self, operation, pointers, value, mask, *more)

    def recorded_cas(self: Any, pointers: Any, *more: Any) -> Any:
        launches[-1].loads.note(pointers, None)
        launches[-1].stores.note(pointers, None)
        return cas(self, pointers, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", recorded_run)
        patch.setattr(builder, "create_masked_load", recorded_load)
        patch.setattr(builder, "create_masked_store", recorded_store)
        patch.setattr(builder, "create_atomic_rmw", recorded_rmw)
        patch.setattr(builder, "create_atomic_cas", recorded_cas)
        yield launches
