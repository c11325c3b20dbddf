"""What the kernels need to know about the machine: the interpreter or a device, and a device's name as a folder."""

from __future__ import annotations

import os
import re

__all__ = ["device_slug", "interpreter_enabled"]


def interpreter_enabled() -> bool:
    """Whether `@triton.jit` functions run in Triton's interpreter, on CPU tensors.

    Reads TRITON_INTERPRET at every call. Triton itself decides when a function is decorated, so the variable must be
    set before the first kernel is imported and stay as it is.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def device_slug(name: str) -> str:
    """The folder name of a device: lower-case letters, digits and single underscores.

    Args:
        name: the device's name as its driver reports it, for example `NVIDIA H200`, whose slug is `nvidia_h200`.

    Raises:
        ValueError: `name` holds no letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ValueError(f"name must hold an ASCII letter or digit, got {name!r}")
    return slug
