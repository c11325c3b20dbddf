"""What the public operators of the gated delta rule accept, checked before anything is computed."""

from __future__ import annotations

import math

import torch

__all__ = ["check_arguments"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
MOST_DIM = 256


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> None:
    """Checks shapes, data types, devices and which arguments go together; no value on a GPU is waited for.

    Raises:
        ValueError: names the argument, what it must be and what it is.
    """
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, seqlen, heads, key_dim], got the shape {tuple(q.shape)}")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v must be [{q.shape[0]}, {q.shape[1]}, value_heads, value_dim], got the shape {tuple(v.shape)}"
        )
    batch, seqlen, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if not heads or not value_heads or value_heads % heads:
        raise ValueError(f"v must have a multiple of q's {heads} heads, got {value_heads}")
    for name, dim in (("q", key_dim), ("v", value_dim)):
        if not 1 <= dim <= MOST_DIM:
            raise ValueError(f"{name} must have heads of 1 to {MOST_DIM} elements, got {dim}")
    sequences = batch if cu_seqlens is None else _checked_sequences(q, cu_seqlens)
    of_tokens = (batch, seqlen, value_heads)
    shapes = {
        "k": (k, tuple(q.shape)),
        "g": (g, of_tokens),
        "beta": (beta, of_tokens),
        "initial_state": (initial_state, (sequences, value_heads, key_dim, value_dim)),
        "A_log": (A_log, (value_heads,)),
        "dt_bias": (dt_bias, (value_heads,)),
    }
    for name, (each, shape) in shapes.items():
        if each is not None and tuple(each.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(each.shape)}")
    for name, each in {"q": q, "v": v, **{name: each for name, (each, _) in shapes.items()}}.items():
        if each is not None and each.dtype not in FLOATS:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {each.dtype}")
        if each is not None and each.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {each.device}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
    for name, each in (("A_log", A_log), ("dt_bias", dt_bias)):
        if each is not None and not use_gate_in_kernel:
            raise ValueError(f"{name} has a meaning with use_gate_in_kernel=True only, got a tensor without it")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True doubles the sigmoid of beta: it needs use_beta_sigmoid_in_kernel=True")


def _checked_sequences(q: torch.Tensor, cu_seqlens: torch.Tensor) -> int:
    """The number of documents."""
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            "cu_seqlens must be int32 or int64 [documents + 1], "
            f"got {cu_seqlens.dtype} of the shape {tuple(cu_seqlens.shape)}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"q must have a batch of 1 with cu_seqlens, got {q.shape[0]}: pack the rows into one")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        borders = cu_seqlens.to(torch.int64)
        if borders[0] != 0 or borders[-1] != q.shape[1] or (borders.diff() < 0).any():
            raise ValueError(
                f"cu_seqlens must run from 0 to the {q.shape[1]} tokens of q and not decrease, got {borders.tolist()}"
            )
    return cu_seqlens.shape[0] - 1
