"""Progress of reading or writing many bytes: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from automodel.observe.formats import format_compact, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ByteProgress"]

_ERASE_LINE = "\r\x1b[2K"
_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 10.0


class ByteProgress:
    """Shows how much of a task is done; a context that takes the live line away at its end.

    A task shorter than the first interval shows nothing. A stream that fails is given up silently.
    """

    def __init__(
        self, stream: TextIO | None, what: str, *, total: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin a task of `total` bytes (or of as many as `expect` says); nothing is shown where `stream` is None."""
        self._stream, self._what, self._clock = stream, what, clock
        self.expect(total)
        self._live = stream is not None and stream.isatty()
        self._started = self._shown = clock()
        self._done = 0
        self._drawn = False

    def __enter__(self) -> ByteProgress:
        """Return the progress itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the live line away."""
        if self._drawn:
            self._write(_ERASE_LINE)

    def expect(self, total: int) -> None:
        """Set the number of bytes of the whole task, where it shows only after the beginning."""
        self._total = max(1, total)

    def advance(self, count: int) -> None:
        """Count `count` more bytes as done."""
        self._done += count
        now = self._clock()
        if now - self._shown < (_REDRAW_SECONDS if self._live else _PLAIN_SECONDS):
            return
        self._shown = now
        rate = self._done / max(1e-9, now - self._started)
        left = max(0, self._total - self._done) / max(1e-9, rate)
        text = (
            f"{self._what}: {min(100, 100 * self._done // self._total)}% of {_format_bytes(self._total)}"
            f"  {_format_bytes(rate)}/s  {format_duration(left)} left"
        )
        self._drawn = self._drawn or self._live
        self._write(f"{_ERASE_LINE}{text}" if self._live else f"{text}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None


def _format_bytes(count: float) -> str:
    """Three digits of a number of bytes: 950B, 12.3MB, 4GB."""
    return format_compact(count).replace("B", "G") + "B"
