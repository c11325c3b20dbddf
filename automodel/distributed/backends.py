"""Which library carries the collectives of each kind of device."""

import logging

import torch
import torch.distributed as dist

__all__ = ["choose_backend"]

logger = logging.getLogger(__name__)

_CPU_DEFAULT = "gloo"
_CUDA_DEFAULT = "nccl"


def choose_backend(backend: str | None, device: torch.device) -> str:
    """Return the backend for `init_process_group`; the host always has one, which carries small values.

    Args:
        backend: `dist_env.backend`: null, one name, or pairs such as `cpu:gloo,cuda:nccl`.
        device: Where the model is.

    Raises:
        ValueError: there is no such backend here.
    """
    wanted = _parse(backend, device)
    if device.type == "cpu":
        if _CUDA_DEFAULT in wanted.values():
            logger.warning("dist_env.backend %s needs GPUs, which this machine lacks: gloo is used", backend)
        wanted = {"cpu": wanted.get("cpu", _CPU_DEFAULT)}
        if wanted["cpu"] == _CUDA_DEFAULT:
            wanted["cpu"] = _CPU_DEFAULT
    else:
        wanted.setdefault(device.type, _CUDA_DEFAULT if device.type == "cuda" else _CPU_DEFAULT)
        wanted.setdefault("cpu", _CPU_DEFAULT)
    for name in wanted.values():
        if not dist.is_backend_available(name):
            raise ValueError(f"dist_env.backend must be available in this build of torch, got {backend!r}")
    if set(wanted) == {"cpu"}:
        return wanted["cpu"]
    return ",".join(f"{kind}:{wanted[kind]}" for kind in sorted(wanted))


def _parse(backend: str | None, device: torch.device) -> dict[str, str]:
    """Backends by kind of device; a name alone is that of the model's device."""
    if backend is None:
        return {}
    wanted = {}
    for part in backend.lower().split(","):
        kind, _, name = part.strip().rpartition(":")
        known = [known for known in dist.Backend.backend_list if known not in ("undefined", "fake")]
        if name not in known or kind not in ("", "cpu", "cuda"):
            examples = ", ".join((*known, "cpu:gloo,cuda:nccl"))
            raise ValueError(f"dist_env.backend must be null or one of {examples}, got {backend!r}")
        wanted[kind or device.type] = name
    return wanted
