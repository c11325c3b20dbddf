"""This process's place among the processes of a job, as torchrun or Slurm puts it into the environment."""

import os
from dataclasses import dataclass
from typing import Literal

from automodel.distributed.slurm import derive_port, expand_nodelist, tasks_on_node

__all__ = ["LaunchEnvironment", "is_speaker", "read_launch_environment", "unset_rank_defaults"]

Launcher = Literal["torchrun", "slurm"]

_TRUE = {"1", "true", "yes"}


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Where a process stands in its job.

    Attributes:
        rank: Its number among all processes.
        local_rank: Its number among those of its node.
        world_size: How many processes the job has.
        local_world_size: How many its node has, where the launcher says so.
        launcher: Whose variables say so; None when nothing launched the process.
        master_addr: The host where the ranks meet.
        master_port: The port where they meet.
        restart_count: How often torchrun has started the ranks again.
        uses_agent_store: Whether the launcher keeps the store where the ranks meet, instead of rank zero.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1
    launcher: Launcher | None = None
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    uses_agent_store: bool = False


def read_launch_environment() -> LaunchEnvironment:
    """Read torchrun's variables, else those of a Slurm step; otherwise the process is alone.

    Raises:
        ValueError: a variable is no integer, is missing beside the others, or contradicts them.
    """
    if any(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_torchrun()
    # The script of a batch job and an allocation's shell have SLURM_NTASKS too, but are no ranks of a step.
    if "SLURM_STEP_NUM_TASKS" in os.environ or ("SLURM_STEP_ID" in os.environ and "SLURM_NTASKS" in os.environ):
        return _read_slurm()
    return LaunchEnvironment()


def is_speaker() -> bool:
    """Whether this process tells a mistake that all those of its job make: rank zero, or one without a valid rank."""
    try:
        return read_launch_environment().rank == 0
    except ValueError:
        return True


def unset_rank_defaults(processes: int) -> dict[str, str]:
    """Return the settings that `processes` ranks on this machine should have and the environment leaves open.

    Each gets its share of the cores, and gloo meets on the loopback interface, whatever the host's name resolves to.
    PyTorch's C++ part writes errors only: its warning about a store that has gone would bury the line that says so.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // processes)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if os.uname().sysname == "Linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _read_torchrun() -> LaunchEnvironment:
    rank, world_size, local_rank = _integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK")
    if world_size is None:
        given = "LOCAL_RANK" if rank is None else "RANK"
        raise ValueError(f"environment variable {given} is set, but WORLD_SIZE is not")
    if world_size > 1:
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            if value is None:
                raise ValueError(f"environment variable WORLD_SIZE is {world_size}, but {name} is not set")
    launch = LaunchEnvironment(
        rank=rank or 0,
        local_rank=local_rank or 0,
        world_size=world_size,
        local_world_size=1 if world_size == 1 else _integer("LOCAL_WORLD_SIZE"),
        launcher="torchrun",
        master_addr=os.environ.get("MASTER_ADDR"),
        master_port=_integer("MASTER_PORT"),
        restart_count=_integer("TORCHELASTIC_RESTART_COUNT") or 0,
        uses_agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _TRUE,
    )
    return _checked(launch, rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK")


def _read_slurm() -> LaunchEnvironment:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    rank, world_size, local_rank = _integer("SLURM_PROCID"), _integer(tasks), _integer("SLURM_LOCALID")
    if world_size is None or world_size == 1:
        # One task may start processes of its own, so it counts as launched by nobody.
        return LaunchEnvironment()
    for name, value in (("SLURM_PROCID", rank), ("SLURM_LOCALID", local_rank)):
        if value is None:
            raise ValueError(f"environment variable {tasks} is {world_size}, but {name} is not set")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    hosts = expand_nodelist(nodes)
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""
    node, port, job = _integer("SLURM_NODEID") or 0, _integer("MASTER_PORT"), _integer("SLURM_JOB_ID")
    if port is None and job is not None:
        port = derive_port(job, step=_integer("SLURM_STEP_ID") or 0)
    launch = LaunchEnvironment(
        rank=rank or 0,
        local_rank=local_rank or 0,
        world_size=world_size,
        local_world_size=tasks_on_node(per_node, node=node),
        launcher="slurm",
        master_addr=os.environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=port,
        restart_count=_integer("SLURM_RESTART_COUNT") or 0,
    )
    return _checked(launch, rank="SLURM_PROCID", world_size=tasks, local_rank="SLURM_LOCALID")


def _checked(launch: LaunchEnvironment, *, rank: str, world_size: str, local_rank: str) -> LaunchEnvironment:
    """Refuse numbers that contradict each other, by the names of their variables."""
    if launch.world_size < 1:
        raise ValueError(f"environment variable {world_size} must be positive, got {launch.world_size}")
    if not 0 <= launch.rank < launch.world_size:
        raise ValueError(f"environment variable {rank} must be from 0 to {launch.world_size - 1}, got {launch.rank}")
    limit = launch.world_size if launch.local_world_size is None else launch.local_world_size
    if not 0 <= launch.local_rank < limit:
        raise ValueError(f"environment variable {local_rank} must be from 0 to {limit - 1}, got {launch.local_rank}")
    return launch


def _integer(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None
