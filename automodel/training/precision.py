"""The dtype that a training step computes in: bf16 by autocast where the hardware multiplies it fast."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast", "compute_dtype"]

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def compute_dtype(requested: str | None, *, device: torch.device) -> torch.dtype:
    """Return the dtype of a step's matrix products.

    Args:
        requested: A name from the recipe (`float32`, `bfloat16`, also with the prefix `torch.`), or None: bf16 on a CPU
            with AVX512-BF16 and on a GPU that supports it, else fp32.
        device: Where the step runs.

    Raises:
        ValueError: an unknown name.
    """
    if requested is not None:
        try:
            return _DTYPES[requested.removeprefix("torch.")]
        except KeyError:
            raise ValueError(
                f"distributed.mp_policy.param_dtype must be one of {sorted(_DTYPES)}, got {requested!r}"
            ) from None
    if device.type == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


def autocast(dtype: torch.dtype, *, device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which a forward pass and its loss run; fp32 needs none."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
