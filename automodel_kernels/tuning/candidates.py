"""What a space of configurations is; the spaces themselves are in `tuning.spaces`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from automodel_kernels.hardware import TARGETS, Target, find_target

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["COMPILER_OPTIONS", "Candidates", "Config", "Space"]

COMPILER_OPTIONS = frozenset({"maxnreg", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "kpack"})
"""Options of Triton's compiler that a configuration may set beside the kernel's own arguments."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of a kernel.

    Attributes:
        meta: the kernel's constexpr arguments that are tuned, by name; `COMPILER_OPTIONS` may stand here
            too.
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

    def get(self, target: Target, *, dtype: torch.dtype, flags: Mapping[str, object]) -> Candidates:
        """The candidates of a launch; the first configuration is the static choice.

        Raises:
            ValueError: the space does not claim the launch; names target, data type and flags.
        """
        found = self.find(target, dtype=dtype, flags=flags)
        if found is None:
            raise ValueError(f"{self.name} has no configuration for {dtype} on {target.name} with {dict(flags)}")
        return found
