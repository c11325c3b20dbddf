"""The configurations that a kernel may take on each target: every list, named once.

A space is a list of `Candidates`; the first that matches a launch's target, data type and flags holds its
configurations, and the first of those is the static choice. A configuration stands in a space only if it fits the
target's shared memory and keeps within the stack that the candidates declare; `automodel_kernels/resources.json`
proves that for every one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from automodel_kernels.hardware import TARGETS, Target, find_target

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ROW_NORM", "ROW_REPAIR", "Candidates", "Config", "Space"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of a kernel.

    Attributes:
        meta: the kernel's constexpr arguments that are tuned, by name; further options of Triton's compiler
            (`maxnreg`, `waves_per_eu`) may stand here too.
        num_warps: warps of a program.
        num_stages: stages of Triton's software pipelines.
    """

    meta: Mapping[str, int | bool | str]
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.num_warps not in {1, 2, 4, 8, 16, 32}:
            raise ValueError(f"num_warps must be a power of two up to 32, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be positive, got {self.num_stages}")

    @property
    def options(self) -> dict[str, int | bool | str]:
        """The keyword arguments that a launch adds to its own: `kernel[grid](..., **config.options)`."""
        return {**self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def label(self) -> str:
        """The configuration in one short line, the same for the same one: `BLOCK_N=1024 warps=4 stages=1`."""
        meta = [f"{name}={self.meta[name]}" for name in sorted(self.meta)]
        return " ".join([*meta, f"warps={self.num_warps}", f"stages={self.num_stages}"])


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The configurations for some launches on some targets.

    Attributes:
        configs: best guess first: it is the choice where nothing is tuned.
        targets: names of targets.
        dtypes: the launches' data types; None means every one.
        flags: arguments that the launch must have, such as `{"ALIGNED": False}`.
        accepted_stack: bytes of stack a thread that these configurations may use on these targets.
    """

    configs: tuple[Config, ...]
    targets: tuple[str, ...] = tuple(TARGETS)
    dtypes: tuple[torch.dtype, ...] | None = None
    flags: Mapping[str, int | bool | str] = field(default_factory=dict)
    accepted_stack: int = 0

    def __post_init__(self) -> None:
        for name in self.targets:
            find_target(name)
        if not self.configs:
            raise ValueError("configs must hold at least one configuration, got none")
        labels = [config.label for config in self.configs]
        if len(set(labels)) < len(labels):
            raise ValueError(f"configs must differ, got {labels}")
        if self.accepted_stack < 0:
            raise ValueError(f"accepted_stack must not be negative, got {self.accepted_stack}")

    def match(self, target: Target, *, dtype: torch.dtype, flags: Mapping[str, object]) -> bool:
        """Whether a launch with these flags (a superset of ours) takes its configuration from here."""
        return (
            target.name in self.targets
            and (self.dtypes is None or dtype in self.dtypes)
            and all(name in flags and flags[name] == value for name, value in self.flags.items())
        )


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a kernel may take, per target, data type and flags.

    Attributes:
        name: shown in errors.
        candidates: the first that matches counts; where none does, the space does not claim that launch.
    """

    name: str
    candidates: tuple[Candidates, ...]

    def find(self, target: Target, *, dtype: torch.dtype, flags: Mapping[str, object]) -> Candidates | None:
        """The candidates of a launch; None where this space does not claim it.

        Args:
            target: the GPU.
            dtype: the launch's data type.
            flags: the launch's arguments, or at least those that the candidates' flags name.
        """
        return next((each for each in self.candidates if each.match(target, dtype=dtype, flags=flags)), None)

    def default(self, target: Target, *, dtype: torch.dtype, flags: Mapping[str, object]) -> Config:
        """The static choice: the first configuration of the launch's candidates.

        Raises:
            ValueError: the space does not claim the launch; names target, data type and flags.
        """
        found = self.find(target, dtype=dtype, flags=flags)
        if found is None:
            raise ValueError(f"{self.name} has no configuration for {dtype} on {target.name} with {dict(flags)}")
        return found.configs[0]


def _row_norm_candidates(dtypes: tuple[torch.dtype, ...], targets: tuple[str, ...]) -> tuple[Candidates, ...]:
    # Every thread has at least 32 bytes in flight; the tiles differ in how many rows share a program, which is what
    # matters between narrow shards and whole rows.
    wide = (
        Config(meta={"BLOCK_M": 4, "BLOCK_N": 1024}, num_warps=4),
        Config(meta={"BLOCK_M": 1, "BLOCK_N": 4096}, num_warps=4),
        Config(meta={"BLOCK_M": 8, "BLOCK_N": 512}, num_warps=8),
    )
    # One element a load: a smaller tile, or the addresses alone fill the registers.
    narrow = (Config(meta={"BLOCK_M": 4, "BLOCK_N": 512}, num_warps=4),)
    return (
        Candidates(configs=wide, targets=targets, dtypes=dtypes, flags={"ALIGNED": True}),
        Candidates(configs=narrow, targets=targets, dtypes=dtypes, flags={"ALIGNED": False}),
    )


def _targets_with(float8: torch.dtype) -> tuple[str, ...]:
    name = str(float8).removeprefix("torch.")
    return tuple(target.name for target in TARGETS.values() if name in target.float8)


ROW_NORM = Space(
    name="row_norm",
    candidates=(
        *_row_norm_candidates((torch.bfloat16, torch.float32, torch.float16), tuple(TARGETS)),
        *_row_norm_candidates((torch.float8_e4m3fn,), _targets_with(torch.float8_e4m3fn)),
        *_row_norm_candidates((torch.float8_e5m2,), _targets_with(torch.float8_e5m2)),
    ),
)
"""Each data type of 8 bits apart, on the targets that have it."""

ROW_REPAIR = Space(
    name="row_repair",
    candidates=(Candidates(configs=(Config(meta={"BLOCK_N": 1024}, num_warps=4),)),),
)
"""A program copies a piece of one row, 8 elements a thread: with few rows, more programs hide more latency."""
