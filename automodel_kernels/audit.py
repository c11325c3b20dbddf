"""What a stretch of a program made Triton compile and tune: kernel, key, time, whose it was, and what came too late.

    with ColdStartAudit() as audit:
        step()
        audit.mark_warm()
        for _ in range(1000):
            step()
    print(audit.table())
    assert not audit.violations

Of every kernel that Triton compiles, or finds in its cache on disk, the audit sees it once in a process: launches with
the same key find it in memory. It lists our own tunings and those of `triton.autotune`, whose times include that of the
compiles inside, which stand on lines of their own.

Not seen: what torch.compile does besides Triton kernels (its C++ on a CPU), Inductor's own tunings, and compiles in
other processes, such as Inductor's pool of compilers, whose results count as disk hits when this process loads them.
"""

from __future__ import annotations

import functools
import json
import logging
import resource
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import triton
from triton.runtime.autotuner import Autotuner

from automodel_kernels.tuning import autotune

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from automodel_kernels.tuning.autotune import Tuning

__all__ = ["ColdStartAudit", "Event", "Kind", "Owner", "Total", "owner_of"]

logger = logging.getLogger(__name__)

Kind = Literal["compile", "failed compile", "disk hit", "tuning"]
Owner = Literal["ours", "fla", "mamba_ssm", "causal_conv1d", "inductor", "other"]

PACKAGES: dict[str, Owner] = {
    "automodel_kernels": "ours",
    "fla": "fla",
    "mamba_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
}

# What a table shows of a key; the whole one stands in the JSON.
KEY_WIDTH = 16

# Audits may begin and end in several threads; each changes attributes that all share.
_installing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Event:
    """One compile, disk hit or tuning.

    Attributes:
        kind: `compile`; `failed compile`, which raised an error; `disk hit`, a binary loaded from Triton's cache; or
            `tuning`, the measurements for one key.
        kernel: the kernel function's name.
        key: of a binary Triton's cache key (empty for a failed compile), of a tuning the tuning key.
        owner: whose kernel it is.
        seconds: wall time; of a tuning all of its measurements, compiles included.
        cpu_seconds: processor time of its thread and of the programs that ended meanwhile, such as the assembler; those
            of another thread's compile count for both. None where it is not known: in a compiler's own threads, for
            kernels of Inductor, and for our own tunings.
        started: seconds from the audit's beginning.
        violation: whether it came after `mark_warm`.
        detail: what sets it apart from others of the same kernel: the types, alignments and constants of a binary, or
            how many candidates a tuning measured.
    """

    kind: Kind
    kernel: str
    key: str
    owner: Owner
    seconds: float
    cpu_seconds: float | None
    started: float
    violation: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum over the events of one kind and owner.

    Attributes:
        kind: of the events.
        owner: of the events.
        count: how many there are.
        seconds: their wall time.
        cpu_seconds: their processor time, as far as it is known.
    """

    kind: Kind
    owner: Owner
    count: int
    seconds: float
    cpu_seconds: float


class _Compile:
    """A compile that goes on in a thread."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.started = time.perf_counter()
        self.cpu_started = _cpu_seconds()
        self.reported = False


class _AutotunerRun:
    """The measurements of a `triton.autotune` for one key; `place` is that of their event in the audit's list."""

    def __init__(self, autotuner: Any, *, key: str, place: int, warm: bool) -> None:
        self.what = (autotuner, key, warm)
        self.place = place
        self.configs: list[Any] = []
        self.failed = 0


class _Threads(threading.local):
    """What goes on in each thread: its compiles, and the tuning to which its next measurement may belong."""

    def __init__(self) -> None:
        self.compiles: list[_Compile] = []
        self.run: _AutotunerRun | None = None


class ColdStartAudit:
    """Lists the compiles and tunings inside a `with` block, in every thread; see the module.

    Audits may be nested, each lists all that happens inside it. One audit may be used for several blocks, one after the
    other, and goes on with its list. Launches that find their kernel in memory take no longer for it.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._threads = _Threads()
        self._undo: list[Callable[[], None]] = []
        self._active = False
        self._warm = False
        self._began: float | None = None

    def __enter__(self) -> ColdStartAudit:
        """Begins to listen.

        Raises:
            RuntimeError: this audit listens already.
        """
        with _installing:
            if self._active:
                raise RuntimeError("this ColdStartAudit listens already: use another one for a nested block")
            self._active = True
            if self._began is None:
                self._began = time.perf_counter()
            # A bound method is a new object each time that it is read.
            hook = self._note_tuning
            autotune.listeners.append(hook)
            self._undo.append(lambda: autotune.listeners.remove(hook))
            self._undo.append(_wrap(triton.knobs.compilation, "listener", self._listener))
            for owner, name, wrapper, lost in (
                (triton.runtime.JITFunction, "_do_compile", self._compiling, "CPU seconds and no failed compiles"),
                (Autotuner, "_bench", self._measuring, "tunings of triton.autotune"),
            ):
                if hasattr(owner, name):
                    self._undo.append(_wrap(owner, name, wrapper))
                else:
                    what = f"{owner.__name__}.{name}"
                    logger.warning("triton %s has no %s: the audit lists no %s", triton.__version__, what, lost)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends listening; errors pass through."""
        with _installing:
            self._active = False
            while self._undo:
                self._undo.pop()()

    def mark_warm(self) -> None:
        """Ends the warm-up: nothing should be compiled, loaded or tuned after this, and what is counts as a violation.

        A disk hit counts, too: the warm-up did not reach that binary, and elsewhere it would be a compile.
        """
        with self._lock:
            self._warm = True

    @property
    def events(self) -> list[Event]:
        """Everything that happened, in the order in which it ended; a tuning of Triton's stands where it began."""
        with self._lock:
            return list(self._events)

    @property
    def violations(self) -> list[Event]:
        """What happened after `mark_warm`, in the same order."""
        return [event for event in self.events if event.violation]

    @property
    def totals(self) -> list[Total]:
        """The sums per kind and owner over all events, the longest first."""
        return _totals(self.events)

    def table(self) -> str:
        """The report as aligned text, the longest first; violations stand apart, with what is special about each."""
        events = self.events
        lines = [*_event_lines([event for event in events if not event.violation]), "", *_total_lines(_totals(events))]
        if self._warm:
            late = [event for event in events if event.violation]
            lines += ["", f"after warm-up: {len(late)} violation{'' if len(late) == 1 else 's'}"]
            lines += _event_lines(late, details=True) if late else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as a JSON object: `warm`, `events`, `violations` and `totals`; in lists the longest is first."""
        events = _longest_first(self.events)
        report = {
            "warm": self._warm,
            "events": [asdict(event) for event in events if not event.violation],
            "violations": [asdict(event) for event in events if event.violation],
            "totals": [asdict(total) for total in _totals(events)],
        }
        return json.dumps(report, indent=2)

    def _add(self, *, seconds: float, cpu_seconds: float | None = None, detail: str = "", **what: Any) -> int:
        """Notes what ends now; returns its place in the list."""
        assert self._began is not None
        started = time.perf_counter() - seconds - self._began
        with self._lock:
            event = Event(
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                started=started,
                violation=self._warm,
                detail=detail,
                **what,
            )
            self._events.append(event)
            return len(self._events) - 1

    def _listener(self, former: Any) -> Callable[..., None]:
        """Triton's listener for binaries that it compiled or found."""

        def listen(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **more: Any) -> None:
            if self._active:
                function = getattr(src, "fn", None)
                going = self._threads.compiles[-1] if self._threads.compiles else None
                cpu_seconds = None
                if going is not None and going.function is function:
                    going.reported = True
                    cpu_seconds = _cpu_seconds() - going.cpu_started
                self._add(
                    kind="disk hit" if cache_hit else "compile",
                    kernel=str(src.name),
                    key=str(metadata.get("hash", "")),
                    owner=owner_of(function),
                    seconds=times.total / 1e6,
                    cpu_seconds=cpu_seconds,
                    detail=_specialisation(src, metadata),
                )
            if former is not None:
                former(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **more)

        return listen

    def _compiling(self, former: Callable[..., Any]) -> Callable[..., Any]:
        """Around a launch's compile: the listener is called at its end only, and not at all where it fails."""

        @functools.wraps(former)
        def do_compile(function: Any, *arguments: Any, **options: Any) -> Any:
            if not self._active:
                return former(function, *arguments, **options)
            going = _Compile(function)
            self._threads.compiles.append(going)
            try:
                return former(function, *arguments, **options)
            except Exception as error:
                if not going.reported:
                    self._add(
                        kind="failed compile",
                        kernel=str(function.__name__),
                        key="",
                        owner=owner_of(function),
                        seconds=time.perf_counter() - going.started,
                        cpu_seconds=_cpu_seconds() - going.cpu_started,
                        detail=type(error).__name__,
                    )
                raise
            finally:
                self._threads.compiles.pop()

        return do_compile

    def _measuring(self, former: Callable[..., Any]) -> Callable[..., Any]:
        """Around the measurement of one configuration by `triton.autotune`."""

        @functools.wraps(former)
        def bench(autotuner: Any, *arguments: Any, config: Any, **meta: Any) -> Any:
            if not self._active:
                return former(autotuner, *arguments, config=config, **meta)
            run = self._find_run(autotuner, key=_autotuner_key(autotuner, arguments, meta), config=config)
            started, cpu_started, failed = time.perf_counter(), _cpu_seconds(), True
            try:
                timings = former(autotuner, *arguments, config=config, **meta)
                first = timings[0] if isinstance(timings, list | tuple) else timings
                failed = first == float("inf")  # what Triton makes of a configuration that does not work
                return timings
            finally:
                run.configs.append(config)
                run.failed += failed
                self._add_measurement(
                    run, seconds=time.perf_counter() - started, cpu_seconds=_cpu_seconds() - cpu_started
                )

        return bench

    def _find_run(self, autotuner: Any, *, key: str, config: Any) -> _AutotunerRun:
        """The tuning that a measurement belongs to: the last one in this thread, or a new one with its event."""
        run = self._threads.run
        if run is None or run.what != (autotuner, key, self._warm) or any(each is config for each in run.configs):
            function = _plain_function(autotuner)
            place = self._add(
                kind="tuning", kernel=function.__name__, key=key, owner=owner_of(function), seconds=0.0, cpu_seconds=0.0
            )
            run = _AutotunerRun(autotuner, key=key, place=place, warm=self._events[place].violation)
            self._threads.run = run
        return run

    def _add_measurement(self, run: _AutotunerRun, *, seconds: float, cpu_seconds: float) -> None:
        with self._lock:
            event = self._events[run.place]
            self._events[run.place] = replace(
                event,
                seconds=event.seconds + seconds,
                cpu_seconds=(event.cpu_seconds or 0.0) + cpu_seconds,
                detail=_count_candidates(len(run.configs), failed=run.failed),
            )

    def _note_tuning(self, tuning: Tuning) -> None:
        """Our tuning layer calls this for each of its tunings."""
        module, _, name = tuning.kernel.rpartition(":")
        failed = sum(trial.milliseconds is None for trial in tuning.trials)
        self._add(
            kind="tuning",
            kernel=name,
            key=", ".join(f"{name}={value}" for name, value in tuning.key.items()),
            owner=PACKAGES.get(module.partition(".")[0], "other"),
            seconds=tuning.seconds,
            detail=f"{_count_candidates(len(tuning.trials), failed=failed)}, {tuning.measured} measured",
        )


def owner_of(function: Any) -> Owner:
    """Whose a kernel is: by its module's package, else by a folder of its file, as for kernels from a model hub.

    Args:
        function: a `@triton.jit` function, with or without decorators around it, or the plain function; None gives
            `other`.
    """
    plain = _plain_function(function)
    module = str(getattr(plain, "__module__", ""))
    file = PurePath(getattr(getattr(plain, "__code__", None), "co_filename", ""))
    # Inductor writes its kernels to files in its cache, and imports them as modules below its own.
    if module.startswith("torch._inductor.") or any(part.startswith("torchinductor") for part in file.parts[:-1]):
        return "inductor"
    for part in (module.partition(".")[0], *reversed(file.parts[:-1])):
        if part in PACKAGES:
            return PACKAGES[part]
    return "other"


def _plain_function(function: Any) -> Any:
    while hasattr(function, "fn"):
        function = function.fn
    return function


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replaces an attribute by a wrapper of it; returns what undoes that."""
    former = getattr(owner, name)
    wrapper = make(former)
    setattr(owner, name, wrapper)

    def undo() -> None:
        # Another one has put its own around ours and did not end before us: ours stays inside it and does nothing.
        if getattr(owner, name) is wrapper:
            setattr(owner, name, former)

    return undo


def _cpu_seconds() -> float:
    """Processor time of this thread, and of the ended programs that this process started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def _specialisation(src: Any, metadata: dict[str, Any]) -> str:
    """What a binary is for: `x_ptr: *bf16 /16, num_rows: i32, BLOCK_N=1024, num_warps=4`; /16 is a known divisor."""
    constants, attributes = getattr(src, "constants", {}), getattr(src, "attrs", {})
    parts = []
    for place, (name, kind) in enumerate(getattr(src, "signature", {}).items()):
        if (place,) in constants:
            parts.append(f"{name}={constants[place,]}")
            continue
        divisors = [f" /{value}" for attribute, value in attributes.get((place,), ()) if attribute == "tt.divisibility"]
        parts.append(f"{name}: {kind}{''.join(divisors)}")
    options = [f"{name}={metadata[name]}" for name in ("num_warps", "num_stages") if name in metadata]
    return ", ".join([*parts, *options])


def _autotuner_key(autotuner: Any, arguments: Sequence[Any], meta: dict[str, Any]) -> str:
    """The key as `triton.autotune` forms it: the values of the key's arguments, and the data types of all tensors."""
    names = autotuner.arg_names
    given = {**dict(zip(names, arguments, strict=False)), **meta}
    given = {name: getattr(each, "dtype", each) for name, each in given.items() if name in names}
    types = [each for each in given.values() if type(each).__name__ == "dtype"]
    return ", ".join(str(each) for each in [*(given[name] for name in autotuner.keys if name in given), *types])


def _count_candidates(number: int, *, failed: int) -> str:
    text = f"{number} candidate{'' if number == 1 else 's'}"
    return f"{text}, {failed} failed" if failed else text


def _longest_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: -event.seconds)


def _totals(events: Iterable[Event]) -> list[Total]:
    groups: dict[tuple[Kind, Owner], list[Event]] = {}
    for event in events:
        groups.setdefault((event.kind, event.owner), []).append(event)
    totals = [
        Total(
            kind=kind,
            owner=owner,
            count=len(group),
            seconds=sum(event.seconds for event in group),
            cpu_seconds=sum(event.cpu_seconds or 0.0 for event in group),
        )
        for (kind, owner), group in groups.items()
    ]
    return sorted(totals, key=lambda total: -total.seconds)


def _total_lines(totals: Iterable[Total]) -> list[str]:
    rows = [
        (each.kind, each.owner, str(each.count), f"{each.seconds:.3f}", f"{each.cpu_seconds:.3f}") for each in totals
    ]
    return _aligned([("total", "whose", "number", "seconds", "CPU s"), *rows], left=2)


def _event_lines(events: Iterable[Event], *, details: bool = False) -> list[str]:
    """A table of events, the longest first; with details, each has a line on what sets it apart."""
    events = _longest_first(events)
    rows = [
        (
            each.kind,
            each.owner,
            each.kernel,
            each.key[:KEY_WIDTH],
            f"{each.seconds:.3f}",
            "-" if each.cpu_seconds is None else f"{each.cpu_seconds:.3f}",
        )
        for each in events
    ]
    head, *lines = _aligned([("kind", "whose", "kernel", "key", "seconds", "CPU s"), *rows], left=4)
    if details:
        lines = [each for line, event in zip(lines, events, strict=True) for each in (line, f"    {event.detail}")]
    return [head, *lines]


def _aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Rows with their first `left` columns flush left and the others, numbers, flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            each.ljust(width) if column < left else each.rjust(width)
            for column, (each, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
