"""Makes bfloat16 and float8 right in Triton's interpreter.

The interpreter keeps bfloat16 as uint16 and float8 as uint8: it rounds towards zero, multiplies and adds the integers,
and has no float8 NaN or Inf. Inside `exact_narrow_floats()` conversions round to nearest even as PyTorch's do, and a
float8 out of range becomes the largest value as on GPUs; matrix products widen their operands to fp32. Element-wise
arithmetic on these types raises, since our kernels do it in fp32.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["exact_narrow_floats"]

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
BITS = {1: torch.uint8, 2: torch.int16}


def is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar in NARROW


def widen(handle: Any) -> np.ndarray:
    """The values of a handle in fp32 if they are narrow, else as they are."""
    if not is_narrow(handle):
        return handle.data
    dtype = NARROW[handle.dtype.scalar]
    bits = torch.from_numpy(np.array(handle.data, order="C").view(f"i{dtype.itemsize}"))
    return bits.view(BITS[dtype.itemsize]).view(dtype).to(torch.float32).numpy()


def narrow(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Floats, rounded to a narrow type, as the bits that the interpreter keeps."""
    wide = torch.from_numpy(np.array(values, order="C", dtype=np.float64 if values.dtype == np.float64 else np.float32))
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        wide = wide.clamp(-largest, largest)
    return wide.to(dtype).view(BITS[dtype.itemsize]).numpy().view(f"u{dtype.itemsize}")


def convert(builder: Any, src: Any, dst_type: Any, _rounding: object = None) -> Any:
    scalar = dst_type.scalar
    data = widen(src)
    data = narrow(data, NARROW[scalar]) if scalar in NARROW else data.astype(interpreter._get_np_dtype(scalar))
    return interpreter.TensorHandle(data, scalar)


def dot(builder: Any, a: Any, b: Any, d: Any, _precision: object, _imprecise: object) -> Any:
    product = np.matmul(widen(a), widen(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for operands that are not narrow."""

    def checked(builder: Any, *arguments: Any) -> Any:
        for each in arguments:
            if isinstance(each, interpreter.TensorHandle) and is_narrow(each):
                raise TypeError(f"element-wise arithmetic on {each.dtype.scalar}; convert to float32 first")
        return method(builder, *arguments)

    return checked


@contextmanager
def exact_narrow_floats() -> Iterator[None]:
    """Inside it kernels under the interpreter compute with bfloat16 and float8 as described above."""
    builder = interpreter.InterpreterBuilder
    replacements = dict.fromkeys(("cast_impl", "create_fp_to_fp"), convert) | {"create_dot": dot}
    arithmetic = (
        "binary_op",
        "unary_op",
        "create_fma",
        "create_clampf",
        "create_rsqrt",
        "create_erf",
        "create_atomic_rmw",
    )
    replacements |= {name: refusing(getattr(builder, name)) for name in arithmetic}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replacements.items():
            patch.setattr(builder, name, function)
        yield
