"""Where timings and winners that were measured on this kind of GPU outlive the process; nowhere by default.

    set_store(FolderStore(Path("tuning")))

A store may be shared by processes that tune at the same time. Whatever goes wrong in one never fails a launch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FolderStore", "Scope", "Trial", "TuningStore", "current_store", "guarded", "set_store"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """All that a timing depends on: what was measured in one scope says nothing in another.

    Attributes:
        kernel: `module:name` of the function.
        key: the launch's key as JSON.
        device: the GPU's name; others share its target, an H100 and an H200 for example.
        sm_count: its multiprocessors.
        shared_memory: bytes that one program can have there.
        triton: the compiler's version.
        space: hash of the candidates, in their order.
        source: hash of the kernel's source.
        bit_exact: whether only candidates with the static choice's bits count.
    """

    kernel: str
    key: str
    device: str
    sm_count: int
    shared_memory: int
    triton: str
    space: str
    source: str
    bit_exact: bool

    @property
    def digest(self) -> str:
        """A short hash of everything."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one candidate.

    Attributes:
        config: its label.
        milliseconds: median time of a launch; None if it failed.
        reason: empty, or why it failed.
    """

    config: str
    milliseconds: float | None = None
    reason: str = ""


class TuningStore(Protocol):
    """What the tuning layer needs of a store. Methods may raise anything: that becomes one warning."""

    def find_winner(self, scope: Scope) -> str | None:
        """The label of the scope's winner; None if none was recorded. Once found it stays the same."""
        ...

    def record_winner(self, scope: Scope, config: str) -> None:
        """Records a winner, unless the scope has one."""
        ...

    def find_trials(self, scope: Scope) -> dict[str, Trial]:
        """What is known of the scope's candidates, by label."""
        ...

    def record_trial(self, scope: Scope, trial: Trial) -> None:
        """Records what came of a candidate; it is there for other processes when this returns."""
        ...


class FolderStore:
    """A folder with one file of JSON lines per scope, on a disk that processes of one machine share.

    Lines are only ever appended, each in one write that reaches the disk before it counts; the first winner, and the
    first trial of a candidate, hold. A line that a killed process left torn is passed over.

    Args:
        folder: made when something is recorded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_winner(self, scope: Scope) -> str | None:
        """The label of the scope's winner."""
        winners = (line.get("winner") for line in self._lines(scope))
        return next((label for label in winners if isinstance(label, str)), None)

    def record_winner(self, scope: Scope, config: str) -> None:
        """Appends a winner."""
        self._append(scope, {"winner": config})

    def find_trials(self, scope: Scope) -> dict[str, Trial]:
        """The trials by label."""
        trials: dict[str, Trial] = {}
        for line in self._lines(scope):
            config, milliseconds, reason = (line.get(name) for name in ("config", "milliseconds", "reason"))
            if isinstance(config, str) and isinstance(milliseconds, float | None) and isinstance(reason, str):
                trials.setdefault(config, Trial(config=config, milliseconds=milliseconds, reason=reason))
        return trials

    def record_trial(self, scope: Scope, trial: Trial) -> None:
        """Appends a trial."""
        self._append(scope, asdict(trial))

    def _path(self, scope: Scope) -> Path:
        return self._folder / f"{scope.kernel.rpartition(':')[2]}-{scope.digest}.jsonl"

    def _lines(self, scope: Scope) -> list[dict[str, Any]]:
        try:
            content = self._path(scope).read_bytes()
        except FileNotFoundError:
            return []
        lines = []
        for text in content.split(b"\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines

    def _append(self, scope: Scope, line: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(scope)
        new = not path.exists()
        # The line break before it ends a line that was left torn.
        content = b"\n" + json.dumps(line).encode() + b"\n"
        if new:
            content = json.dumps({"scope": asdict(scope)}).encode() + content
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if written < len(content):
            raise OSError(f"{path}: only {written} of {len(content)} bytes could be written")


_store: TuningStore | None = None
_warned = False


def set_store(store: TuningStore | None) -> None:
    """Makes a store the one of this process; None, the default, means none."""
    global _store, _warned
    _store, _warned = store, False


def current_store() -> TuningStore | None:
    """The store of this process."""
    return _store


def guarded(action: Callable[[TuningStore], Any]) -> Any:
    """What an action on the process's store returns; None without a store, and when it fails, which warns once."""
    global _warned
    if _store is None:
        return None
    try:
        return action(_store)
    except Exception as error:  # a store only saves time: its failure must not be the launch's
        if not _warned:
            logger.warning(
                "the store of tuned configurations failed, and tuning goes on without it: %r", error, exc_info=True
            )
        _warned = True
        return None
