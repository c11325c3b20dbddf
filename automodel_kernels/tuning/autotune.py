"""Launches a kernel in the configuration that is chosen for it, under a key that the kernel states.

    @tuned(space=spaces.ROW_NORM, key=("x_ptr", "ALIGNED"), outputs=("norms_ptr",))
    @triton.jit(do_not_specialize=["x_ptr", "norms_ptr", ...])
    def row_squared_norms_kernel(x_ptr, norms_ptr, ..., ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr): ...

    row_squared_norms_kernel[grid](x, norms, ..., ALIGNED=aligned)

The key is all that the choice depends on, and nothing but it: a tensor stands for its data type, any other argument for
its value. That holds for binaries, too, since Triton may specialise on nothing but constexprs.

The choice for a key, in this order: what this process knows; the table that ships for the GPU (`tuning.table`); the
store (`tuning.store`); else what the policy says (`tuning.policy`): measure the candidates, take the first, or stop. In
PyTorch's deterministic mode the table counts and then the first candidate: what was measured on this machine does not.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from automodel_kernels.hardware import can_measure, current_device, current_target, launch_place
from automodel_kernels.tuning import store, table
from automodel_kernels.tuning.decoration import check_decoration, is_constexpr
from automodel_kernels.tuning.keys import key_fields
from automodel_kernels.tuning.policy import current_settings, resolve_policy
from automodel_kernels.tuning.search import NoMemoryError, Search, Tuning
from automodel_kernels.tuning.sources import function_hash
from automodel_kernels.tuning.timing import extra_memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from automodel_kernels.hardware import Device
    from automodel_kernels.tuning.candidates import Config, Space
    from automodel_kernels.tuning.keys import KeyValue
    from automodel_kernels.tuning.policy import Settings

__all__ = ["Tuned", "Tuning", "listeners", "recorder", "tuned"]

logger = logging.getLogger(__name__)

listeners: list[Callable[[Tuning], None]] = []
"""Called with every tuning that measured something, in the thread that tuned."""

recorder: Callable[[Tuned, dict[str, Any]], None] | None = None
"""If set, launches do not happen: it is called with the kernel and the launch's arguments by name instead."""

# One tuning at a time: two would spoil each other's times.
_lock = threading.RLock()


def tuned(
    *,
    space: Space,
    key: tuple[str, ...],
    outputs: tuple[str, ...] = (),
    restores: tuple[str, ...] = (),
    tables: Callable[[], Path] = table.shipped_tables,
) -> Callable[[Any], Tuned]:
    """Decorates a `@triton.jit` function, whose launches then choose their configuration in `space`; see the module.

    Args:
        space: the configurations. Each sets the same constexpr arguments, which launches do not pass.
        key: names of arguments; the first is a tensor, whose data type chooses the candidates. Arguments that the
            candidates' flags name are among the others.
        outputs: names of the tensors that the kernel writes, whatever they held before.
        restores: names of the tensors that it changes in place; tuning works on copies of them.
        tables: the folder of the tables that ship.

    Raises:
        ValueError: at decoration, when a name is no argument of the function, or not one of the kind that is asked for
            here; when configurations do not fit the function; or when an argument that is not constexpr may be
            specialised (is not in `do_not_specialize`).
    """
    return lambda fn: Tuned(fn, space=space, key=key, outputs=outputs, restores=restores, tables=tables)


class Tuned:
    """A `@triton.jit` function that is launched in the configuration chosen for it; made by `tuned`.

    Attributes:
        fn: the jit function, which takes its configuration from whoever launches it.
        space: its configurations.
        key: names of the arguments that the choice depends on.
        outputs: names of the tensors that it writes.
        restores: names of the tensors that it changes in place.
        constexprs: names of its constexpr arguments, those that configurations set too.
    """

    def __init__(
        self,
        fn: Any,
        *,
        space: Space,
        key: tuple[str, ...],
        outputs: tuple[str, ...],
        restores: tuple[str, ...],
        tables: Callable[[], Path],
    ) -> None:
        self.fn = fn
        self.space = space
        self.key = key
        self.outputs = outputs
        self.restores = restores
        python_function = _python_function(fn)
        self.__name__: str = python_function.__name__
        self.__qualname__ = python_function.__qualname__
        self.__module__ = python_function.__module__
        self.__doc__ = python_function.__doc__
        self._full_name = f"{self.__module__}:{self.__qualname__}"
        parameters = inspect.signature(python_function).parameters
        self.constexprs = tuple(name for name, parameter in parameters.items() if is_constexpr(parameter))
        check_decoration(self, parameters)
        self._names = tuple(parameters)
        self._places = tuple((self._names.index(name), name) for name in key)
        self._tables = tables
        self._shipped: dict[Device, list[table.Entry]] = {}
        # Options by all that they depend on, for launches; and winners by place, gate and key, for any policy.
        self._memo: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._winners: dict[tuple[Any, ...], Config] = {}

    def __repr__(self) -> str:
        return f"Tuned({self._full_name})"

    def __getitem__(self, grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]) -> Callable[..., None]:
        """`kernel[grid](...)` launches; a callable grid gets all arguments by name, those of the configuration too."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, /, *args: Any, **kwargs: Any) -> None:
        if recorder is not None:
            recorder(self, dict(zip(self._names, args, strict=False)) | kwargs)
            return
        count = len(args)
        values = [args[place] if place < count else kwargs[name] for place, name in self._places]
        first = values[0]
        memo_key = (
            launch_place(first.device),
            current_settings(),
            torch.are_deterministic_algorithms_enabled(),
            *[getattr(value, "dtype", value) for value in values],
        )
        options = self._memo.get(memo_key)
        if not first.is_cuda:
            if options is None:
                options = self._choose(memo_key, grid, args, kwargs, device=first.device)
            self.fn.run(*args, grid=grid, warmup=False, **kwargs, **options)
            return
        # Triton launches on the current GPU, which need not be the tensors'.
        with torch.cuda.device_of(first):
            if options is None:
                options = self._choose(memo_key, grid, args, kwargs, device=first.device)
            self.fn.run(*args, grid=grid, warmup=False, **kwargs, **options)

    def _choose(
        self,
        memo_key: tuple[Any, ...],
        grid: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
    ) -> dict[str, Any]:
        with _lock:
            options = self._memo.get(memo_key)
            if options is not None:
                return options
            place, settings, deterministic, *values = memo_key
            arguments = dict(zip(self._names, args, strict=False)) | kwargs
            launch = _Launch(place, settings, deterministic, tuple(values), device, grid, arguments)
            config, keep = self._decide(launch)
            if keep:
                self._memo[memo_key] = config.options
            return config.options

    def _decide(self, launch: _Launch) -> tuple[Config, bool]:
        """The configuration of a launch, and whether it is that of all launches alike."""
        flags = dict(zip(self.key, launch.values, strict=True))
        configs = self.space.get(current_target(launch.device), dtype=launch.values[0], flags=flags).configs
        if len(configs) == 1:
            return configs[0], True
        winner = self._winners.get(launch.winner_key) if not launch.deterministic else None
        if winner is None:
            winner = self._shipped_winner(launch, configs)
        if winner is None and not launch.deterministic:
            winner = self._stored_winner(launch, configs)
        if winner is not None:
            return winner, True
        measurable = can_measure(launch.device)
        policy = "static" if launch.deterministic else resolve_policy(launch.settings, measurable=measurable)
        match policy:
            case "static":
                return configs[0], True
            case "tune" if measurable and torch.cuda.is_current_stream_capturing():
                logger.warning("%s cannot be tuned in the capture of a CUDA graph and runs untuned there", self)
                return configs[0], False
            case "tune":
                return self._tune(launch, configs), True
            case "error":
                raise RuntimeError(
                    f"{self._full_name} has no tuned configuration for {key_fields(self.key, launch.values)} on "
                    f"{_device_name(launch.device)}, and the tuning policy is 'error'; 'tune' measures one, 'static' "
                    "takes the first (kernels.tuning in a recipe, AUTOMODEL_TUNING in the environment)"
                )

    def _shipped_winner(self, launch: _Launch, configs: tuple[Config, ...]) -> Config | None:
        gpu = current_device(launch.device)
        if gpu is None:
            return None
        if gpu not in self._shipped:
            self._shipped[gpu] = self._read_shipped(gpu)
        fields = key_fields(self.key, launch.values)
        for entry in self._shipped[gpu]:
            # The static choice has the static choice's bits.
            exact = entry.bit_exact or entry.config == configs[0].label
            if entry.key == fields and (exact or not launch.settings.bit_exact):
                return _labelled(configs, entry.config)
        return None

    def _read_shipped(self, gpu: Device) -> list[table.Entry]:
        def problem(key: Mapping[str, KeyValue], label: str) -> str:
            if key.keys() != set(self.key):
                return f"key must name {', '.join(self.key)}, got {dict(key)}"
            dtype = getattr(torch, str(key[self.key[0]]), None)
            found = None
            if isinstance(dtype, torch.dtype):
                found = self.space.find(gpu.target, dtype=dtype, flags=key)
            if found is None:
                return f"the space {self.space.name} has no candidates for {dict(key)} on {gpu.target.name}"
            if _labelled(found.configs, label) is None:
                return f"config {label!r} is no candidate of the space {self.space.name} for {dict(key)}"
            return ""

        try:
            folder = self._tables()
        except FileNotFoundError as error:
            logger.warning("%s", error)
            return []
        return table.read_table(folder, device=gpu, kernel=self._full_name, problem=problem)

    def _stored_winner(self, launch: _Launch, configs: tuple[Config, ...]) -> Config | None:
        scope = self._scope(launch, configs)
        if scope is None:
            return None
        label = store.guarded(lambda each: each.find_winner(scope))
        winner = _labelled(configs, label)
        if winner is not None:
            self._keep(launch, winner)
        return winner

    def _keep(self, launch: _Launch, winner: Config) -> None:
        self._winners[launch.winner_key] = winner
        # It holds for launches that had to do without it before, too.
        self._memo.clear()

    def _scope(self, launch: _Launch, configs: tuple[Config, ...]) -> store.Scope | None:
        """Where the store keeps what is measured; None where there is no store, or no GPU that has a name."""
        gpu = current_device(launch.device)
        if gpu is None or store.current_store() is None:
            return None
        labels = "\n".join(config.label for config in configs)
        return store.Scope(
            kernel=self._full_name,
            key=json.dumps(key_fields(self.key, launch.values), sort_keys=True),
            device=gpu.name,
            sm_count=gpu.sm_count,
            shared_memory=gpu.shared_memory,
            triton=triton.__version__,
            space=hashlib.sha256(labels.encode()).hexdigest()[:16],
            source=function_hash(self.fn),
            bit_exact=launch.settings.bit_exact,
        )

    def _tune(self, launch: _Launch, configs: tuple[Config, ...]) -> Config:
        scope = self._scope(launch, configs)

        def record(trial: store.Trial) -> None:
            if scope is not None:
                store.guarded(lambda each: each.record_trial(scope, trial))

        search = Search(
            run=functools.partial(self.fn.run, grid=launch.grid),
            name=self._full_name,
            key=key_fields(self.key, launch.values),
            device=launch.device,
            device_name=_device_name(launch.device),
            arguments=launch.arguments,
            written=(*self.outputs, *self.restores),
            restores=self.restores,
            bit_exact=launch.settings.bit_exact,
            most_bytes=extra_memory_limit(launch.device),
            record=record,
        )
        known = store.guarded(lambda each: each.find_trials(scope)) if scope is not None else None
        try:
            tuning = search.tune(configs, known=known or {})
        except NoMemoryError as error:
            logger.warning("%s; it runs untuned", error)
            return configs[0]
        if scope is not None and tuning.final:
            store.guarded(lambda each: each.record_winner(scope, tuning.chosen.label))
            # Of processes that tune at the same time all take the first one's winner.
            first = _labelled(configs, store.guarded(lambda each: each.find_winner(scope)))
            tuning = tuning if first is None else replace(tuning, chosen=first)
        self._keep(launch, tuning.chosen)
        _announce(tuning)
        return tuning.chosen


class _Launch(NamedTuple):
    """A launch that waits for its configuration.

    Attributes:
        place: which GPU it is for.
        settings: the policy that was asked for.
        deterministic: PyTorch's mode.
        values: of the key, in its order; data types for tensors.
        device: of the tensors.
        grid: of the launch.
        arguments: of the launch, by name.
    """

    place: int
    settings: Settings
    deterministic: bool
    values: tuple[Any, ...]
    device: torch.device
    grid: Any
    arguments: dict[str, Any]

    @property
    def winner_key(self) -> tuple[Any, ...]:
        """What a winner depends on, however it was found."""
        return (self.place, self.settings.bit_exact, *self.values)


def _announce(tuning: Tuning) -> None:
    if not tuning.measured:
        return
    logger.info("tuned %s", tuning)
    for listener in list(listeners):
        try:
            listener(tuning)
        except Exception:
            logger.exception("a listener failed on the tuning of %s", tuning.kernel)


def _labelled(configs: tuple[Config, ...], label: str | None) -> Config | None:
    return next((config for config in configs if config.label == label), None)


def _device_name(device: torch.device) -> str:
    gpu = current_device(device)
    return current_target(device).name if gpu is None else gpu.name


def _python_function(fn: Any) -> Any:
    while not inspect.isfunction(fn):
        fn = fn.fn
    return fn
