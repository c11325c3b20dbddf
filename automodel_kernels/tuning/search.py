"""Measures a kernel's candidates on the tensors of a launch, and leaves those as they were."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.errors import TritonError

from automodel_kernels.tuning.store import Trial
from automodel_kernels.tuning.timing import time_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from automodel_kernels.tuning.candidates import Config
    from automodel_kernels.tuning.keys import KeyValue

__all__ = ["NoMemoryError", "Search", "Tuning"]

logger = logging.getLogger(__name__)

MOST_REASON = 200
OTHER_BITS = "its outputs differ from the static choice's"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NoMemoryError(RuntimeError):
    """Tuning would need more memory than it may take."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What came of tuning a kernel for one key.

    Attributes:
        kernel: `module:name` of the function.
        key: the key, as it stands in files.
        device: the GPU's name, or its target's.
        seconds: how long it took.
        trials: of every candidate, the static choice first.
        measured: how many of them were measured now; the others were known.
        chosen: the winner.
        extra_bytes: the most memory that it took beside the launch's own.
        bit_exact: whether only candidates with the static choice's bits counted.
        final: whether all failures will happen again, so that the winner may be kept.
    """

    kernel: str
    key: Mapping[str, KeyValue]
    device: str
    seconds: float
    trials: tuple[Trial, ...]
    measured: int
    chosen: Config
    extra_bytes: int
    bit_exact: bool
    final: bool

    def __str__(self) -> str:
        times = {trial.config: trial.milliseconds for trial in self.trials}
        static = self.trials[0].milliseconds
        failed = sum(trial.milliseconds is None for trial in self.trials)
        return (
            f"{self.kernel} for {dict(self.key)} on {self.device}: {self.chosen.label} takes "
            f"{times[self.chosen.label]:.4g} ms, the static choice "
            f"{'failed' if static is None else f'{static:.4g} ms'}; {len(self.trials)} candidates, "
            f"{self.measured} measured, {failed} failed, {self.seconds:.1f} s, {self.extra_bytes} bytes of extra memory"
        )


@dataclass(kw_only=True)
class Search:
    """One tuning.

    Attributes:
        run: launches with the launch's arguments by name and a configuration's options; with `warmup` it compiles only.
        name: `module:name` of the function.
        key: see `Tuning`, as `device_name` and `bit_exact`.
        device: where the tensors are.
        arguments: of the launch, by name.
        written: names of the tensors that the kernel writes or changes.
        restores: names of those that it changes.
        most_bytes: memory that it may take beside the launch's own; None for as much as there is.
        record: is told every trial that would come out the same again, the moment it is known.
    """

    run: Callable[..., Any]
    name: str
    key: Mapping[str, KeyValue]
    device: torch.device
    device_name: str
    arguments: Mapping[str, Any]
    written: Sequence[str]
    restores: Sequence[str]
    bit_exact: bool
    most_bytes: int | None
    record: Callable[[Trial], None]

    # The copies that stand in for tensors of the launch, each with its tensor, and the arguments with the copies.
    _copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)
    _own_arguments: dict[str, Any] = field(default_factory=dict, init=False)
    _copied_bytes: int = field(default=0, init=False)
    _timing_bytes: int = field(default=0, init=False)
    _static_bits: list[torch.Tensor] | None = field(default=None, init=False)
    _final: bool = field(default=True, init=False)

    def tune(self, configs: Sequence[Config], *, known: Mapping[str, Trial]) -> Tuning:
        """Measures the candidates that are not known, and chooses the fastest of all; of equal ones the first.

        Args:
            configs: the candidates, the static choice first.
            known: earlier trials by label.

        Raises:
            NoMemoryError: copies of the tensors that the kernel changes or writes would take too much memory; nothing
                was measured.
            RuntimeError: no candidate works; holds the reasons.
        """
        start = time.perf_counter()
        if any(config.label not in known for config in configs):
            self._prepare()
        trials, measured = [], 0
        for config in configs:
            trial = known.get(config.label)
            if trial is None:
                trial = self._try(config, static=configs[0])
                measured += 1
            trials.append(trial)
            if self.bit_exact and trials[0].milliseconds is None:
                break  # there are no bits to compare with
        times = {trial.config: trial.milliseconds for trial in trials if trial.milliseconds is not None}
        if not times:
            reasons = "\n".join(f"  {trial.config}: {trial.reason}" for trial in trials)
            raise RuntimeError(
                f"{self.name}: no configuration works for {dict(self.key)} on {self.device_name}:\n{reasons}"
            )
        best = min(times, key=lambda label: times[label])
        return Tuning(
            kernel=self.name,
            key=self.key,
            device=self.device_name,
            seconds=time.perf_counter() - start,
            trials=tuple(trials),
            measured=measured,
            chosen=next(config for config in configs if config.label == best),
            extra_bytes=self._copied_bytes + self._timing_bytes,
            bit_exact=self.bit_exact,
            final=self._final,
        )

    def _prepare(self) -> None:
        """Puts copies in the place of the tensors that the kernel changes, after a look at what they will take."""
        named = {name: each for name, each in self.arguments.items() if isinstance(each, torch.Tensor)}
        uses = Counter(_identity(each) for each in named.values())
        changed: dict[tuple[Any, ...], torch.Tensor] = {}
        for name in self.written:
            tensor = named.get(name)
            # What is written under one name and read under another is changed, too.
            if tensor is not None and (self.bit_exact or name in self.restores or uses[_identity(tensor)] > 1):
                changed[_identity(tensor)] = tensor
        self._copied_bytes = sum(_extent(each) for each in changed.values())
        if self.bit_exact:
            self._copied_bytes += sum(each.numel() * each.element_size() for each in changed.values())
        if self.most_bytes is not None and self._copied_bytes > self.most_bytes:
            raise NoMemoryError(
                f"tuning {self.name} takes {self._copied_bytes} bytes, and {self.most_bytes} may be taken"
            )
        try:
            self._copies = {identity: (each, _copy(each)) for identity, each in changed.items()}
        except torch.OutOfMemoryError as error:
            raise NoMemoryError(f"tuning {self.name} takes {self._copied_bytes} bytes: {error}") from error
        self._own_arguments = {name: self._own(each) for name, each in self.arguments.items()}

    def _own(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _identity(value) not in self._copies:
            return value
        return self._copies[_identity(value)][1]

    def _try(self, config: Config, *, static: Config) -> Trial:
        try:
            self._compile(config)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this candidate's failure
            return self._fail(config, error)
        try:
            if self.bit_exact and config is not static and not self._bits_match(config, static=static):
                return self._noted(Trial(config=config.label, reason=OTHER_BITS))
            limit = None if self.most_bytes is None else self.most_bytes - self._copied_bytes
            timed = time_launch(lambda: self._launch(config), device=self.device, most_bytes=limit)
        except (TritonError, torch.OutOfMemoryError) as error:
            # Out of resources, or what the interpreter met; a fault of the GPU is no candidate's alone and goes on up.
            return self._fail(config, error)
        self._timing_bytes = max(self._timing_bytes, timed.extra_bytes)
        return self._noted(Trial(config=config.label, milliseconds=timed.milliseconds))

    def _compile(self, config: Config) -> None:
        self.run(warmup=True, **self._own_arguments, **config.options)

    def _launch(self, config: Config) -> None:
        self.run(warmup=False, **self._own_arguments, **config.options)

    def _fail(self, config: Config, error: Exception) -> Trial:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        # The compiler shows the source first, and says what is wrong with it last.
        trial = Trial(config=config.label, reason=f"{type(error).__name__}: {lines[-1].strip()}"[:MOST_REASON])
        if isinstance(error, torch.OutOfMemoryError):
            self._final = False  # memory may be there another time
            return trial
        return self._noted(trial)

    def _noted(self, trial: Trial) -> Trial:
        self.record(trial)
        return trial

    def _bits_match(self, config: Config, *, static: Config) -> bool:
        if self.device.type == "meta":
            return True
        if self._static_bits is None:
            self._static_bits = [each.clone() for each in self._results(static)]
        return all(map(torch.equal, self._results(config), self._static_bits))

    def _results(self, config: Config) -> list[torch.Tensor]:
        """The bits of what a launch writes, which goes on top of what the launch's own tensors hold."""
        for original, copy in self._copies.values():
            copy.copy_(original)
        self._launch(config)
        return [_bits(copy) for _, copy in self._copies.values()]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same memory; their own for those without memory."""
    address = id(tensor) if tensor.is_meta else tensor.data_ptr()
    return address, tuple(tensor.shape), tensor.stride()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if tensor.is_meta or not tensor.numel():
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which the launch's arguments tell the kernel."""
    # detach: a parameter is copied as the plain tensor that it is for the kernel.
    copy = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])
