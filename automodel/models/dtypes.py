"""Parameter dtypes as recipes write them."""

import torch

__all__ = ["parse_dtype"]

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(value: str | torch.dtype | None, *, name: str = "torch_dtype") -> torch.dtype | None:
    """Turn a recipe's dtype into a torch dtype.

    Args:
        value: A floating-point torch dtype, its name ("bfloat16", "torch.bfloat16", "bf16"), "auto" or None.
        name: What to call the value in an error message.

    Returns:
        The dtype; None for None and "auto", which leave the choice to the checkpoint.

    Raises:
        ValueError: the value names no floating-point torch dtype.
    """
    if value is None or value == "auto":
        return None
    dtype: object = value
    if isinstance(value, str):
        short = value.removeprefix("torch.")
        dtype = getattr(torch, _ALIASES.get(short, short), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f'{name} must be "auto" or a floating-point dtype such as "bfloat16" or "float32", got {value!r}'
        )
    return dtype
