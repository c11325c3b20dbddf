"""The rows a run leaves in training.jsonl and validation.jsonl: one strict JSON object per line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from automodel.observe.atomic_file import replace_file

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = [
    "METRICS_VERSION",
    "MetricsWriter",
    "TrainingRow",
    "ValidationRow",
    "discard_rows_after",
    "read_rows",
    "set_aside",
    "utc_timestamp",
]

METRICS_VERSION = 1
"""Version of the row format; readers refuse rows of a newer one."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """What one optimizer step did.

    `step` counts from 0. `timestamp` is ISO 8601 in UTC. `loss` is the mean over the step's label tokens (nats a
    token) and `grad_norm` the norm before clipping; both are None where there is none. `mem` is the peak in GiB, `tps`
    and `tps_per_gpu` are tokens a second, `mfu` is per cent. The `time_*` fields are seconds of host time in this
    step; `time_step` is the whole of it. `skipped` marks a step whose update was left out.
    """

    step: int
    epoch: int
    timestamp: str
    loss: float | None
    grad_norm: float | None
    lr: float
    mem: float
    tps: float
    tps_per_gpu: float
    mfu: float | None
    num_tokens_per_step: int
    num_label_tokens: int
    time_data: float
    time_forward: float
    time_backward: float
    time_optimizer: float
    time_step: float
    skipped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """What one pass over the validation data gave.

    `step` is the last optimizer step done before it, -1 before training. `val_loss` is in nats a token, `mem` in GiB,
    `tps` in tokens a second, `time_validation` in seconds.
    """

    step: int
    epoch: int
    timestamp: str
    val_loss: float | None
    lr: float
    mem: float
    tps: float
    num_label_tokens: int
    time_validation: float


def utc_timestamp() -> str:
    """The time now as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class MetricsWriter:
    """Appends rows to a JSON-lines file; trouble with the disk never stops a training step.

    The file is opened at the first row, in append mode; a last line that a killed writer left torn is cut off first.
    Each row reaches the operating system in one write before `append` returns. A row that cannot be written is
    counted and dropped whole, and `close` logs one warning with the count. One process writes a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._dropped = 0
        self._first_error: OSError | None = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, row: TrainingRow | ValidationRow) -> None:
        """Write one row; non-finite numbers become null."""
        line = _encode(row)
        try:
            if self._descriptor is None:
                self._descriptor = _open_for_append(self.path)
            _write_line(self._descriptor, line)
        except OSError as error:
            self._dropped += 1
            self._first_error = self._first_error or error

    def close(self) -> None:
        """Close the file; a later `append` opens it again. Warns once if rows were dropped."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:
                self._first_error = self._first_error or error
        if self._first_error is not None:
            logger.warning(
                "%d metrics rows could not be written to %s: %s", self._dropped, self.path, self._first_error
            )
        self._dropped, self._first_error = 0, None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a metrics file, in order; a missing file has none, a torn last line is passed over.

    Raises:
        ValueError: a row has a newer version than this code knows, or a line other than a torn last one is no JSON
            object; the message names the file and the line.
    """
    return [row for _, row in _parse(path)]


def discard_rows_after(path: Path, step: int) -> int:
    """Drop the rows of steps after `step` and a torn last line; returns how many rows were dropped.

    A run that resumes from the checkpoint of `step` calls this, so that each step appears once. The file is replaced
    in one step: close a `MetricsWriter` on it first. Nothing is written when there is nothing to drop.

    Raises:
        ValueError: as for `read_rows`, or a row has no whole-number step.
        OSError: the file cannot be replaced; the old one is then untouched.
    """
    rows = _parse(path)
    kept: list[bytes] = []
    for number, (line, row) in enumerate(rows, start=1):
        row_step = row.get("step")
        if not isinstance(row_step, int):
            raise ValueError(f"{path}, line {number}: step must be a whole number, got {row_step!r}")
        if row_step <= step:
            kept.append(line + b"\n")
    content = b"".join(kept)
    if path.exists() and path.stat().st_size != len(content):
        replace_file(path, content)
    return len(rows) - len(kept)


def set_aside(path: Path) -> Path | None:
    """Rename a file that an earlier run left, so that a fresh start mixes nothing into it; return its new name."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    logger.info("%s of an earlier run is kept as %s", path.name, aside.name)
    return aside


def _encode(row: TrainingRow | ValidationRow) -> bytes:
    """One row as a line of strict JSON, the version first."""
    values: dict[str, object] = {"version": METRICS_VERSION}
    for name, value in dataclasses.asdict(row).items():
        values[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _open_for_append(path: Path) -> int:
    """Open `path` for appending, its folder made if needed, so that the next row starts on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        _mend_last_line(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mend_last_line(path: Path, descriptor: int) -> None:
    """End a whole last line with its newline, or cut a torn one off."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    content = path.read_bytes()
    if content.endswith(b"\n"):
        return
    whole, _, last = content.rpartition(b"\n")
    if _is_object(last):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, len(content) - len(last))
        logger.warning("%s ended in a torn line of %d bytes, cut off; %d bytes kept", path, len(last), len(whole))


def _write_line(descriptor: int, line: bytes) -> None:
    """Write the whole line or leave the file as it was."""
    size = os.fstat(descriptor).st_size
    try:
        done = 0
        while done < len(line):
            done += os.write(descriptor, line[done:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of the file, without their newline, and the rows they hold."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")
    rows: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _load(line)
        if row is None:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}: not a JSON object: {line[:80]!r}")
        version = row.get("version", METRICS_VERSION)
        if not isinstance(version, int) or version > METRICS_VERSION:
            raise ValueError(
                f"{path}, line {number}: metrics version {version!r} is newer than {METRICS_VERSION}, "
                "the newest that this version of automodel reads"
            )
        rows.append((line, row))
    return rows


def _load(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, None when it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_object(line: bytes) -> bool:
    """Whether `line` is one whole JSON object."""
    return _load(line) is not None
