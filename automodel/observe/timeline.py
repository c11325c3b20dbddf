"""Where the time goes: the phases of a start, and the phases of each step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Phase", "PhaseClock", "Timeline"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A named stretch of time, in seconds."""

    name: str
    seconds: float


class Timeline:
    """The phases of a start, in the order in which they ran, on the host's monotonic clock.

    With `started` (an earlier value of `time.monotonic()`, say the first line of the program) the time until now is
    recorded as the phase "imports".
    """

    def __init__(self, *, started: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: list[Phase] = []
        self._open: str | None = None
        if started is not None:
            self._phases.append(Phase("imports", max(0.0, clock() - started)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended."""
        return tuple(self._phases)

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(phase.seconds for phase in self._phases)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time of the `with` body under `name`, also when it raises.

        Raises:
            RuntimeError: another phase is open; phases do not nest.
        """
        _refuse_nesting(self._open, name)
        self._open = name
        begin = self._clock()
        try:
            yield
        finally:
            self._open = None
            self._phases.append(Phase(name, self._clock() - begin))


class PhaseClock:
    """Seconds of host time in each phase of a step; a phase that runs several times is summed.

    On an accelerator the host only queues work, so a phase shows the time the host spent in it, and the wait for the
    device falls into the phase that synchronises (usually the one that reads the loss or the gradient norm).
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` body to `name`, also when it raises.

        Raises:
            RuntimeError: another phase is open; phases do not nest.
        """
        _refuse_nesting(self._open, name)
        self._open = name
        begin = self._clock()
        try:
            yield
        finally:
            self._open = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - begin

    def take(self) -> dict[str, float]:
        """The seconds per phase since the last call, which are then forgotten.

        Raises:
            RuntimeError: a phase is open.
        """
        if self._open is not None:
            raise RuntimeError(f"phase {self._open!r} is still open")
        seconds, self._seconds = self._seconds, {}
        return seconds


def _refuse_nesting(open_name: str | None, name: str) -> None:
    """Raise when a phase is open."""
    if open_name is not None:
        raise RuntimeError(f"phase {name!r} was opened inside phase {open_name!r}: phases do not nest")
