"""The device that a rank computes on."""

import torch

from automodel.distributed.env import LaunchEnvironment

__all__ = ["choose_device"]


def choose_device(launch: LaunchEnvironment) -> torch.device:
    """Return the GPU of this process's place on its node, or the CPU where there is no GPU.

    Raises:
        ValueError: the node has fewer GPUs than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    available = torch.cuda.device_count()
    if available == 1 and launch.launcher == "slurm":
        # It may show each process its own GPU only.
        return torch.device("cuda", 0)
    if launch.local_rank >= available:
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU: this machine shows {available}; start at most {available} "
            "processes on it"
        )
    return torch.device("cuda", launch.local_rank)
