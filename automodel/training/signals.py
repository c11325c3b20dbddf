"""Signals that ask a run to save and stop: SIGINT (Ctrl-C), SIGTERM, SIGUSR1, and SIGHUP when the terminal is gone."""

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals"]

_STDERR = 2
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """A context in which a stop signal is remembered instead of ending the process.

    The training loop asks `received` between steps. A second Ctrl-C raises KeyboardInterrupt at once. Only Python's
    main thread can receive signals; anywhere else the context does nothing. A signal that the process was started to
    ignore (SIGHUP under nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _STOPS:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._remember)
            except ValueError:
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        first = self.received is None
        self.received = signal.Signals(number)
        if first:
            # Not through a buffered stream: the signal may have come while one was being written.
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"\n{self.received.name}: saving, then stopping\n".encode())
