"""The public operator of Mamba-2's state space duality (SSD), `mamba_chunk_scan_combined`.

For each head, with dt after bias, softplus and clamp, and a state S [P, N] that starts at the initial state or 0:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t  (+ D x_t, then * silu(z_t))

(Dao and Gu 2024, "Transformers are SSMs", equations 1 and 2 with scalar A, and the chunked form of its section 6.)

Why the kernels are cut as they are: at H 80, P 64, N 128 SSD needs 21 kB and 4 MFLOP a token forward, 32 kB and 9.3
MFLOP backward. An H200 moves 4.3 TB/s and computes 790 TFLOP/s in bfloat16 (both measured), so memory is the limit:
40 us and 96 us for 8,192 tokens. Five kernels that hand chunk states in fp32 and C.B^T to each other through memory
move three times that. So:

- *Forward, 3 launches.* `segment_states` reads x and B once and leaves one 16-bit state per segment of up to 1,024
  tokens; `state_passing` turns those into the states that enter the segments; `scan` walks each segment with its state
  in registers, forms C.B^T on chip, and adds D and the gate. Only x is read twice: 1.75 times the floor, 2.0 with the
  states that training keeps every 256 tokens. Neither C.B^T nor an fp32 state ever reaches memory.
- *Backward, 5 launches, 6 with a gate.* The gradient of the state comes chunk by chunk from `state_gradients` and the
  same passing in reverse. Then one launch does dx, dB and dC: each needs the same tiles of x, dy, B, C, S and G, and
  the whole register file, so a program does one of the three, and neighbouring programs, which run at the same time,
  share the tiles in the L2. dB and dC sum over the heads of a block in registers; two blocks a group fill the GPU and
  cost 2 kB a token. 2.4 times the floor; its L2 traffic is the likely next limit (a prediction: no GPU has measured
  it).
- *Programs.* At batch 1 and 2,048 tokens segments shrink to 256 tokens, so that 80 heads give 640 programs for the 132
  multiprocessors of an H200; from 8,192 tokens on there are 640 programs of 1,024 tokens. The backward has 3 programs
  per tile of 64 tokens and block of heads: 768 at 8,192 tokens, and with fewer tokens heads are cut into more blocks.
  The choice depends on shapes only, so that results do not change with the GPU.
- *Numbers.* The cumulative decay is summed once, restarts every 64 tokens, and every kernel reads the same bits. The
  gradient of the decay is summed from fp32 pair terms where they are formed; the shorter form dy.y - dt x.u cancels and
  loses its digits when y and u are 16-bit.

Results are deterministic: every sum has a fixed order, and there are no atomics.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from automodel_kernels.hardware import runs_triton
from automodel_kernels.ssd.operators import ssd

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["mamba_chunk_scan_combined"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128)
LARGEST_STATE = 256


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Mamba-2's selective state space over whole sequences, with gradients for every floating input.

    The names, shapes and results are the field's. Tensors may have any strides and are not copied. Sums are in fp32;
    states are kept in x's dtype between kernels. Everything but `x`, `B`, `C` and `z` may have another dtype than `x`,
    as under autocast; those three are converted to x's dtype if they differ.

    Args:
        x: [batch, seqlen, heads, head_dim] bfloat16, float16 or float32 (float64 too on the CPU); on a GPU head_dim is
            16, 32, 64 or 128.
        dt: [batch, seqlen, heads], the step size.
        A: [heads], negative.
        B: [batch, seqlen, groups, state], the input matrix; heads must be a multiple of groups; on a GPU state is at
            most 256.
        C: as B, the output matrix.
        chunk_size: accepted for the sake of callers; the kernels choose their own tiles, and results do not depend on
            it.
        D: [heads] or [heads, head_dim], the skip connection.
        z: as x, the gate: the output is multiplied by silu(z).
        dt_bias: [heads], added to dt.
        initial_states: [batch, heads, head_dim, state]; with cu_seqlens [documents, heads, head_dim, state].
        seq_idx: [batch, seqlen] integers: the state is reset wherever a token's differs from that of the token before.
        cu_seqlens: [documents + 1] integers on x's device, from 0 to seqlen and not decreasing: each document is
            computed as if it were alone. batch must be 1. Values are checked on the CPU only: a GPU would have to wait.
        dt_softplus: whether softplus is applied to dt + dt_bias.
        dt_limit: least and greatest dt afterwards.
        return_final_states: return the states after the last token, too.
        return_varlen_states: return the states after each document of cu_seqlens, too.

    Returns:
        [batch, seqlen, heads, head_dim] in x's dtype. With `return_final_states` or `return_varlen_states` a tuple of
        it, the final states [batch, heads, head_dim, state] and the documents' [documents, heads, head_dim, state], as
        asked for, in float32 (float64 for a float64 x).

    Raises:
        ValueError: a shape, data type, device or value does not fit; names the argument and what it got.
        RuntimeError: in the backward of the backward, which there is not.
    """
    if x.ndim != 4:
        raise ValueError(f"x must be [batch, seqlen, heads, head_dim], got the shape {tuple(x.shape)}")
    _check_packing(x, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=return_varlen_states)
    _check_inputs(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, cu_seqlens=cu_seqlens)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    least, greatest = (float(each) for each in dt_limit)
    if not 0 <= least <= greatest:
        raise ValueError(f"dt_limit must be two numbers, 0 <= least <= greatest, got {dt_limit}")
    needs_gradients = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (x, dt, A, B, C, D, z, dt_bias, initial_states)
    )
    out, states, _ = ssd(
        x,
        dt,
        A.to(torch.promote_types(x.dtype, torch.float32)),
        B.to(x.dtype),
        C.to(x.dtype),
        D,
        None if z is None else z.to(x.dtype),
        dt_bias,
        initial_states,
        None if seq_idx is None else seq_idx.to(torch.int32),
        None if cu_seqlens is None else cu_seqlens.to(torch.int32),
        dt_softplus,
        least,
        greatest,
        return_final_states or return_varlen_states,
        needs_gradients,
    )
    results = [out]
    if return_final_states:
        results.append(states if cu_seqlens is None else states[-1:])
    if return_varlen_states:
        results.append(states)
    return results[0] if len(results) == 1 else tuple(results)


def _check_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    batch, seqlen, heads, head_dim = x.shape
    if B.ndim != 4 or B.shape[:2] != x.shape[:2]:
        raise ValueError(f"B must be [{batch}, {seqlen}, groups, state], got the shape {tuple(B.shape)}")
    groups, state = B.shape[2:]
    if not groups or heads % groups:
        raise ValueError(f"B must have a number of groups that divides the {heads} heads of x, got {groups}")
    _check_shape("dt", dt, (batch, seqlen, heads))
    _check_shape("A", A, (heads,))
    _check_shape("C", C, (batch, seqlen, groups, state))
    if D is not None and D.ndim == 2:
        _check_shape("D", D, (heads, head_dim))
    else:
        _check_shape("D", D, (heads,))
    _check_shape("z", z, (batch, seqlen, heads, head_dim))
    _check_shape("dt_bias", dt_bias, (heads,))
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_shape("initial_states", initial_states, (sequences, heads, head_dim, state))
    named = {
        "x": x,
        "dt": dt,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "initial_states": initial_states,
    }
    for name, each in named.items():
        if each is None:
            continue
        if each.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {each.device}")
        if not each.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {each.dtype}")
    if runs_triton(x.device):
        _check_kernel_limits(x, state=state)


def _check_kernel_limits(x: torch.Tensor, *, state: int) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, DTYPES))} on a GPU, got {x.dtype}")
    if x.shape[3] not in HEAD_DIMS:
        raise ValueError(f"x must have a head_dim of {', '.join(map(str, HEAD_DIMS))} on a GPU, got {x.shape[3]}")
    if not 1 <= state <= LARGEST_STATE:
        raise ValueError(f"B must have a state of 1 to {LARGEST_STATE} on a GPU, got {state}")


def _check_shape(name: str, tensor: torch.Tensor | None, shape: Sequence[int]) -> None:
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape {tuple(shape)}, got {tuple(tensor.shape)}")


def _check_packing(
    x: torch.Tensor,
    *,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    return_varlen_states: bool,
) -> None:
    _check_shape("seq_idx", seq_idx, x.shape[:2])
    for name, each in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if each is not None and (each.is_floating_point() or each.dtype == torch.bool):
            raise ValueError(f"{name} must be integers, got {each.dtype}")
        if each is not None and each.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {each.device}")
    if cu_seqlens is None:
        if return_varlen_states:
            raise ValueError("return_varlen_states needs cu_seqlens, got None")
        return
    if x.shape[0] != 1:
        raise ValueError(f"x must have a batch of 1 with cu_seqlens, got {x.shape[0]}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [documents + 1], got the shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != x.shape[1] or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens must run from 0 to the {x.shape[1]} tokens of x and not decrease, got {bounds}"
            )
