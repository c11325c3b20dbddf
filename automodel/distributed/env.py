"""This process's place among the processes of a job, as torchrun or Slurm puts it into the environment."""

import os
from dataclasses import dataclass

__all__ = ["LaunchEnvironment", "read_launch_environment"]


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Rank among all processes of the job, rank on this node, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def read_launch_environment() -> LaunchEnvironment:
    """Read torchrun's RANK, LOCAL_RANK and WORLD_SIZE, else those of a Slurm step; otherwise the process is alone.

    Raises:
        ValueError: a variable is no integer.
    """
    if "WORLD_SIZE" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (_read_integer(name) for name in names)
    return LaunchEnvironment(rank=rank or 0, local_rank=local_rank or 0, world_size=world_size or 1)


def _read_integer(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None
