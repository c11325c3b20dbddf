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
    """Read torchrun's RANK, LOCAL_RANK and WORLD_SIZE; a process that nothing launched is alone.

    Raises:
        ValueError: a variable is no integer.
    """
    values = {}
    for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)):
        text = os.environ.get(name)
        try:
            values[name.lower()] = default if text is None else int(text)
        except ValueError:
            raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None
    return LaunchEnvironment(**values)
