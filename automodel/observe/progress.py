"""Progress of a run on a terminal or in a log: one live line with a time estimate, or plain lines."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from typing import TYPE_CHECKING, TextIO

from automodel.observe.formats import format_compact, format_duration, format_learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from automodel.observe.metrics import TrainingRow, ValidationRow

__all__ = ["Progress"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_ERASE_LINE = "\r\x1b[2K"
_DEFAULT_WIDTH = 80
_REDRAW_SECONDS = 0.1
_PLAIN_LINES_PER_RUN = 20


class Progress:
    """Shows the steps of a run on `stream`; steps count from 0 inside and from 1 for people.

    On a terminal one line is drawn over and over, cut to the terminal's width. Anywhere else a line is printed at the
    first and the last step, and in between after `interval_seconds` or a twentieth of the steps, whichever comes
    first. The estimate of the time left leaves out the first step, which is slow because it warms everything up.

    Output is ASCII without colour. A stream that fails (a closed terminal, a broken pipe) is given up silently: it
    never stops a step.
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        first_step: int,
        last_step: int,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to show the steps `first_step` to `last_step`, both included; nothing is shown where `stream` is None.

        Raises:
            ValueError: `last_step` lies more than one before `first_step`, or `interval_seconds` is negative.
        """
        if last_step < first_step - 1:
            raise ValueError(f"last_step must be at least first_step - 1 = {first_step - 1}, got {last_step}")
        if interval_seconds < 0:
            raise ValueError(f"interval_seconds must not be negative, got {interval_seconds}")
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._first_step = first_step
        self._last_step = last_step
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._started = clock()
        self._warm_since: float | None = None
        self._last_output: float | None = None
        self._last_twentieth = -1
        self._fields: list[str] = []
        self._drawn = False

    def step(self, row: TrainingRow) -> None:
        """Show a finished step."""
        now = self._clock()
        if self._warm_since is None:
            self._warm_since = now
        self._fields = self._step_fields(row, now)
        if self._live:
            if self._is_due(row, now, _REDRAW_SECONDS):
                self._last_output = now
                self._draw()
            return
        twentieth = (row.step + 1) * _PLAIN_LINES_PER_RUN // (self._last_step + 1)
        if self._is_due(row, now, self._interval_seconds) or twentieth > self._last_twentieth:
            self._last_output = now
            self._last_twentieth = twentieth
            self._write("  ".join(self._fields) + "\n")

    def validation(self, row: ValidationRow) -> None:
        """Print a line about a pass over the validation data."""
        where = "before training" if row.step < 0 else f"at step {row.step + 1}/{self._last_step + 1}"
        self.message(
            f"validation {where}: loss {_format_loss(row.val_loss)}  "
            f"{format_compact(row.num_label_tokens)} tokens in {format_duration(row.time_validation)}"
        )

    def message(self, text: str) -> None:
        """Print `text` on lines of its own; the live line stays below it.

        Control characters, which a model may write, and characters that the stream cannot encode are escaped.
        """
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        safe = (
            _CONTROL.sub(lambda match: repr(match[0])[1:-1], text).encode(encoding, "backslashreplace").decode(encoding)
        )
        self._write((_ERASE_LINE if self._drawn else "") + safe + "\n")
        if self._drawn:
            self._drawn = False
            self._draw()

    @contextlib.contextmanager
    def log_through(self) -> Iterator[None]:
        """While inside, lines of the log that would go to a terminal are printed above the live line, not over it."""
        root = logging.getLogger()
        to_terminal = [
            handler
            for handler in root.handlers
            if self._live and isinstance(handler, logging.StreamHandler) and handler.stream.isatty()
        ]
        instead = [_MessageHandler(self, handler) for handler in to_terminal]
        for old in to_terminal:
            root.removeHandler(old)
        for new in instead:
            root.addHandler(new)
        try:
            yield
        finally:
            for new in instead:
                root.removeHandler(new)
            for old in to_terminal:
                root.addHandler(old)

    def close(self) -> None:
        """End the live line, its last state left standing. Nothing is shown afterwards."""
        if self._live and self._fields:
            self._draw()
            self._write("\n")
        self._stream = None

    def _is_due(self, row: TrainingRow, now: float, interval: float) -> bool:
        """Whether the first or the last step or the clock asks for output."""
        return self._last_output is None or row.step == self._last_step or now - self._last_output >= interval

    def _step_fields(self, row: TrainingRow, now: float) -> list[str]:
        """The parts of a step's line: step, per cent, loss, learning rate, speed, elapsed, left."""
        total = self._last_step + 1
        number = f"{row.step + 1}".rjust(len(str(total)))
        return [
            f"step {number}/{total}",
            f"{100 * (row.step + 1) // total:3d}%",
            "skipped".ljust(11) if row.skipped else f"loss {_format_loss(row.loss)}",
            f"lr {format_learning_rate(row.lr)}",
            f"{format_compact(row.tps)} tokens/s",
            f"{format_duration(now - self._started)} elapsed",
            f"{self._estimate(row, now)} left",
        ]

    def _estimate(self, row: TrainingRow, now: float) -> str:
        """The time left at the mean pace of the steps after the first one."""
        left = self._last_step - row.step
        if left <= 0:
            return format_duration(0.0) if left == 0 else "-"
        done = row.step - self._first_step
        if self._warm_since is None or done <= 0:
            return "?"
        return format_duration(left * (now - self._warm_since) / done)

    def _draw(self) -> None:
        """Draw the live line, least important parts left out until it fits the terminal."""
        width = self._terminal_width() - 1
        fields = self._fields
        step, percent, loss, _, speed, elapsed, left = fields
        for shorter in (
            [step, percent, loss, speed, elapsed, left],
            [step, percent, loss, speed, left],
            [step, percent, loss, left],
            [step, percent, left],
        ):
            if len("  ".join(fields)) <= width:
                break
            fields = shorter
        self._write(_ERASE_LINE + "  ".join(fields)[:width])
        self._drawn = True

    def _terminal_width(self) -> int:
        """Columns of the terminal, 80 where it does not say."""
        if self._stream is None:
            return _DEFAULT_WIDTH
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_WIDTH
        except (OSError, ValueError):
            return _DEFAULT_WIDTH

    def _write(self, text: str) -> None:
        """Write and flush; give the stream up when it fails."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _MessageHandler(logging.Handler):
    """Prints records as messages of a progress, in the format and from the level of the handler it replaces."""

    def __init__(self, progress: Progress, replaced: logging.Handler) -> None:
        super().__init__(replaced.level)
        self.setFormatter(replaced.formatter)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._progress.message(self.format(record))


def _format_loss(loss: float | None) -> str:
    """A loss with four decimals, or a dash."""
    return "-" if loss is None else f"{loss:.4f}"
