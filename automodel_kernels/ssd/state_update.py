"""One token of Mamba-2's recurrence, for decoding: the state is updated in place.

For each row and head, with x [P], B and C [N] of its group, and the state S [P, N]:

    dt = softplus(dt_raw + dt_bias)        S = exp(dt A) S + dt x B^T        y = S C + D x, then y * silu(z)

dt [P] and A [P, N] are single numbers of the head in Mamba-2, which callers expand; strides of 0 are recognised, and
then there is one exponential a head. All arithmetic is in fp32; y is formed from the state before that is rounded.

Bytes: the state is read and written once, which is nearly all there is. Memory alone is the limit, and with few rows
the number of programs: each has a few rows of one head's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from automodel_kernels.hardware import runs_triton
from automodel_kernels.spans import tile_pointers
from automodel_kernels.ssd.segment_states import softplus
from automodel_kernels.ssd.tiles import state_block
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "StateUpdateInputs",
    "launch_state_update",
    "selective_state_update",
    "selective_state_update_reference",
    "state_update_kernel",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_STATE = 256


class StateUpdateInputs(NamedTuple):
    """The inputs with a dimension for heads: state [S, H, P, N], x, dt and z [B, H, P], B and C [B, G, N]."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None

    @classmethod
    def with_heads(cls, **inputs: torch.Tensor | None) -> StateUpdateInputs:
        """Adds the dimension of heads or groups, of one, where it is missing."""
        shaped: dict[str, Any] = {}
        for name, each in inputs.items():
            missing = each is not None and each.ndim == DIMENSIONS[name] - 1
            place = 0 if name in {"A", "D", "dt_bias"} else 1
            shaped[name] = each.unsqueeze(place) if each is not None and missing else each
        return cls(**shaped)


# How many dimensions each input has where there are heads.
DIMENSIONS = {"state": 4, "x": 3, "dt": 3, "A": 3, "B": 3, "C": 3, "D": 2, "z": 3, "dt_bias": 2}


def selective_state_update_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula, with the arguments of `selective_state_update` and without its checks."""
    given = StateUpdateInputs.with_heads(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    work = torch.promote_types(torch.promote_types(x.dtype, state.dtype), torch.float32)
    wide = StateUpdateInputs(*(None if each is None else each.detach().to(work) for each in given))  # type: ignore[arg-type]
    rows = torch.arange(len(x), device=x.device) if state_batch_indices is None else state_batch_indices.long()
    steps = wide.dt if wide.dt_bias is None else wide.dt + wide.dt_bias
    steps = functional.softplus(steps) if dt_softplus else steps
    per_group = wide.x.shape[1] // wide.B.shape[1]
    b, c = (each.repeat_interleave(per_group, dim=1) for each in (wide.B, wide.C))
    new = torch.exp(steps[..., None] * wide.A) * wide.state[rows] + (steps * wide.x)[..., None] * b[:, :, None]
    y = torch.einsum("bhpn,bhn->bhp", new, c)
    y = y if wide.D is None else y + wide.D * wide.x
    y = y if wide.z is None else y * functional.silu(wide.z)
    given.state.detach()[rows] = new.to(state.dtype)
    return y.to(x.dtype).view(x.shape)


UNSPECIALIZED = (
    "state_ptr",
    "x_ptr",
    "dt_ptr",
    "A_ptr",
    "B_ptr",
    "C_ptr",
    "D_ptr",
    "z_ptr",
    "dt_bias_ptr",
    "indices_ptr",
    "out_ptr",
    "num_heads",
    "head_dim",
    "heads_per_group",
    "stride_state_row",
    "stride_state_head",
    "stride_state_dim",
    "stride_state_n",
    "stride_x_row",
    "stride_x_head",
    "stride_x_dim",
    "stride_dt_row",
    "stride_dt_head",
    "stride_dt_dim",
    "stride_A_head",
    "stride_A_dim",
    "stride_A_n",
    "stride_B_row",
    "stride_B_group",
    "stride_B_n",
    "stride_C_row",
    "stride_C_group",
    "stride_C_n",
    "stride_D_head",
    "stride_D_dim",
    "stride_z_row",
    "stride_z_head",
    "stride_z_dim",
    "stride_dt_bias_head",
    "stride_dt_bias_dim",
    "stride_indices",
)


@tuned(
    space=spaces.SSD_STATE_UPDATE,
    key=("state_ptr", "BLOCK_N", "ALIGNED"),
    outputs=("out_ptr",),
    restores=("state_ptr",),
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def state_update_kernel(
    state_ptr,
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    dt_bias_ptr,
    indices_ptr,
    out_ptr,
    num_heads: tl.int32,
    head_dim: tl.int32,
    heads_per_group: tl.int32,
    stride_state_row: tl.int64,
    stride_state_head: tl.int64,
    stride_state_dim: tl.int64,
    stride_state_n: tl.int64,
    stride_x_row: tl.int64,
    stride_x_head: tl.int64,
    stride_x_dim: tl.int64,
    stride_dt_row: tl.int64,
    stride_dt_head: tl.int64,
    stride_dt_dim: tl.int64,
    stride_A_head: tl.int64,
    stride_A_dim: tl.int64,
    stride_A_n: tl.int64,
    stride_B_row: tl.int64,
    stride_B_group: tl.int64,
    stride_B_n: tl.int64,
    stride_C_row: tl.int64,
    stride_C_group: tl.int64,
    stride_C_n: tl.int64,
    stride_D_head: tl.int64,
    stride_D_dim: tl.int64,
    stride_z_row: tl.int64,
    stride_z_head: tl.int64,
    stride_z_dim: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_dt_bias_dim: tl.int64,
    stride_indices: tl.int64,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    TIED: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program is BLOCK_P rows of the state of one head; TIED: dt and A are single numbers of the head."""
    pid = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(head_dim, BLOCK_P)
    head = pid // num_blocks % num_heads
    row = pid // num_blocks // num_heads
    group = head // heads_per_group
    place = row
    if HAS_INDICES:
        place = tl.load(indices_ptr + row * stride_indices).to(tl.int64)
    offs_p = pid % num_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_p, mask_n = offs_p < head_dim, offs_n < STATE_DIM
    mask = mask_p[:, None] & mask_n[None, :]

    if TIED:
        dt = tl.load(dt_ptr + row * stride_dt_row + head * stride_dt_head).to(tl.float32)
        if HAS_DT_BIAS:
            dt += tl.load(dt_bias_ptr + head * stride_dt_bias_head).to(tl.float32)
    else:
        dt_ptrs = dt_ptr + row * stride_dt_row + head * stride_dt_head + offs_p * stride_dt_dim
        dt = tl.load(dt_ptrs, mask=mask_p, other=0.0).to(tl.float32)
        if HAS_DT_BIAS:
            bias_ptrs = dt_bias_ptr + head * stride_dt_bias_head + offs_p * stride_dt_bias_dim
            dt += tl.load(bias_ptrs, mask=mask_p, other=0.0).to(tl.float32)
    if DT_SOFTPLUS:
        dt = softplus(dt)
    if TIED:
        decay = tl.exp(dt * tl.load(A_ptr + head * stride_A_head).to(tl.float32))
    else:
        A_ptrs = A_ptr + head * stride_A_head + offs_p[:, None] * stride_A_dim + offs_n[None, :] * stride_A_n
        decay = tl.exp(dt[:, None] * tl.load(A_ptrs, mask=mask, other=0.0).to(tl.float32))

    x_ptrs = x_ptr + row * stride_x_row + head * stride_x_head + offs_p * stride_x_dim
    x = tl.load(x_ptrs, mask=mask_p, other=0.0).to(tl.float32)
    B_ptrs = B_ptr + row * stride_B_row + group * stride_B_group + offs_n * stride_B_n
    b = tl.load(B_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    C_ptrs = C_ptr + row * stride_C_row + group * stride_C_group + offs_n * stride_C_n
    c = tl.load(C_ptrs, mask=mask_n, other=0.0).to(tl.float32)

    base_ptr = state_ptr + place * stride_state_row + head * stride_state_head
    state_ptrs = tile_pointers(base_ptr, offs_p, stride_state_dim, offs_n, stride_state_n, ALIGNED)
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    state = state * decay + (dt * x)[:, None] * b[None, :]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=mask)
    y = tl.sum(state * c[None, :], axis=1)
    if HAS_D:
        D_ptrs = D_ptr + head * stride_D_head + offs_p * stride_D_dim
        y += x * tl.load(D_ptrs, mask=mask_p, other=0.0).to(tl.float32)
    if HAS_Z:
        z_ptrs = z_ptr + row * stride_z_row + head * stride_z_head + offs_p * stride_z_dim
        z = tl.load(z_ptrs, mask=mask_p, other=0.0).to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    out_ptrs = out_ptr + (row * num_heads + head) * head_dim + offs_p
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_p)


def _is_tied(inputs: StateUpdateInputs) -> bool:
    """Whether dt, its bias and A are one number a head, expanded."""
    last = [(each, 1) for each in (inputs.dt, inputs.dt_bias) if each is not None] + [(inputs.A, 2)]
    return all(not any(each.stride()[-count:]) for each, count in last)


def launch_state_update(
    inputs: StateUpdateInputs, *, dt_softplus: bool, state_batch_indices: torch.Tensor | None
) -> torch.Tensor:
    """Launches the kernel on checked inputs; arguments and result as of `selective_state_update`."""
    state, x, dt, A, B, C, D, z, dt_bias = inputs
    num_rows, num_heads, head_dim = x.shape
    state_dim = state.shape[3]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        return (num_rows * num_heads * triton.cdiv(head_dim, meta["BLOCK_P"]),)

    state_update_kernel[grid](
        state,
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        x if z is None else z,
        dt if dt_bias is None else dt_bias,
        x if state_batch_indices is None else state_batch_indices,
        out,
        num_heads,
        head_dim,
        num_heads // B.shape[1],
        *state.stride(),
        *x.stride(),
        *dt.stride(),
        *A.stride(),
        *B.stride(),
        *C.stride(),
        *((0, 0) if D is None else D.stride()),
        *((0, 0, 0) if z is None else z.stride()),
        *((0, 0) if dt_bias is None else dt_bias.stride()),
        0 if state_batch_indices is None else state_batch_indices.stride(0),
        HAS_D=D is not None,
        HAS_Z=z is not None,
        HAS_DT_BIAS=dt_bias is not None,
        DT_SOFTPLUS=dt_softplus,
        HAS_INDICES=state_batch_indices is not None,
        TIED=_is_tied(inputs),
        STATE_DIM=state_dim,
        ALIGNED=tensors_aligned(state),
        BLOCK_N=state_block(state_dim),
    )
    return out


def _torch_update(
    inputs: StateUpdateInputs, *, dt_softplus: bool, state_batch_indices: torch.Tensor | None
) -> torch.Tensor:
    state, x, dt, A, B, C, D, z, dt_bias = inputs
    work = torch.promote_types(torch.promote_types(x.dtype, state.dtype), torch.float32)
    num_rows, num_heads, head_dim = x.shape
    num_groups, per_group = B.shape[1], num_heads // B.shape[1]
    if _is_tied(inputs):
        # One number a head, which is broadcast where it is needed.
        dt, A, dt_bias = dt[..., :1], A[..., :1, :1], None if dt_bias is None else dt_bias[..., :1]
    steps = dt.to(work) if dt_bias is None else dt.to(work) + dt_bias
    steps = functional.softplus(steps) if dt_softplus else steps
    wide_x = x.to(work)
    in_place = state.dtype == work and state_batch_indices is None
    rows = state if state_batch_indices is None else state[state_batch_indices]
    new = rows if in_place else rows.to(work, copy=True)
    new.mul_(torch.exp(steps.unsqueeze(3) * A))
    # Heads of one group lie side by side, so that B and C are broadcast and not repeated.
    by_group = new.unflatten(1, (num_groups, per_group))
    by_group.addcmul_(
        (steps * wide_x).reshape(num_rows, num_groups, per_group, head_dim, 1), B.to(work)[:, :, None, None]
    )
    y = (by_group.flatten(2, 3) @ C.to(work).unsqueeze(3)).view(num_rows, num_heads, head_dim)
    if D is not None:
        y.addcmul_(wide_x, D.to(work))
    if z is not None:
        y.mul_(functional.silu(z.to(work)))
    if state_batch_indices is not None:
        state[state_batch_indices] = new.to(state.dtype)
    elif not in_place:
        state.copy_(new)
    out: torch.Tensor = y.to(x.dtype)
    return out


@torch.library.custom_op("automodel_kernels::ssd_state_update", mutates_args=("state",))
def _update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
) -> torch.Tensor:
    update = launch_state_update if runs_triton(x.device) else _torch_update
    inputs = StateUpdateInputs(state, x, dt, A, B, C, D, z, dt_bias)
    return update(inputs, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices)


@_update.register_fake
def _(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.no_grad()
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of the recurrence for each row; the state is changed in place.

    As in the field it is for inference: nothing is recorded for a gradient, whatever requires one. Tensors may have any
    strides, which A, dt, D and dt_bias expanded from one number a head usually have, and different floating dtypes.
    Every shape may also lack the dimension of heads (for B and C of groups): there is one then.

    Args:
        state: [batch, heads, head_dim, state_dim]; with state_batch_indices any number of rows. Written; elements
            must not share memory.
        x: [batch, heads, head_dim].
        dt: [batch, heads, head_dim].
        A: [heads, head_dim, state_dim], negative.
        B: [batch, groups, state_dim]; heads must be a multiple of groups. On a GPU state_dim is at most 256.
        C: as B.
        D: [heads, head_dim].
        z: as x; the output is multiplied by silu(z).
        dt_bias: [heads, head_dim].
        dt_softplus: whether dt goes through softplus.
        state_batch_indices: [batch] int32 or int64: which row of `state` each row is the next token of; all different,
            and within `state`. On a GPU that is not checked, since it would have to wait.

    Returns:
        y as x, in its dtype.

    Raises:
        ValueError: a shape, data type, device or index does not fit; names the argument. Nothing was written.
    """
    inputs = StateUpdateInputs.with_heads(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    _check_inputs(inputs)
    _check_indices(inputs, state_batch_indices)
    out: torch.Tensor = _update(*inputs, dt_softplus, state_batch_indices)
    return out.view(x.shape)


def _check_inputs(inputs: StateUpdateInputs) -> None:
    x, state = inputs.x, inputs.state
    if x.ndim != DIMENSIONS["x"] or inputs.B.ndim != DIMENSIONS["B"] or state.ndim != DIMENSIONS["state"]:
        raise ValueError(
            "x, B and state must be [batch, heads, head_dim], [batch, groups, state_dim] and [batch, heads, head_dim, "
            f"state_dim], or lack the second, got the shapes {tuple(x.shape)}, {tuple(inputs.B.shape)} and "
            f"{tuple(state.shape)}"
        )
    (batch, heads, head_dim), (groups, state_dim) = x.shape, inputs.B.shape[1:]
    if not groups or heads % groups:
        raise ValueError(f"B must have a number of groups that divides the {heads} heads of x, got {groups}")
    shapes: dict[str, Sequence[int]] = {
        "state": (len(state), heads, head_dim, state_dim),
        "dt": (batch, heads, head_dim),
        "A": (heads, head_dim, state_dim),
        "B": (batch, groups, state_dim),
        "C": (batch, groups, state_dim),
        "D": (heads, head_dim),
        "z": (batch, heads, head_dim),
        "dt_bias": (heads, head_dim),
    }
    kernel = runs_triton(x.device)
    if kernel and not 1 <= state_dim <= LARGEST_STATE:
        raise ValueError(f"B must have a state_dim of 1 to {LARGEST_STATE} on a GPU, got {state_dim}")
    for name, each in inputs._asdict().items():
        if each is None:
            continue
        if tuple(each.shape) != tuple(shapes.get(name, each.shape)):
            raise ValueError(f"{name} must have the shape {tuple(shapes[name])}, got {tuple(each.shape)}")
        if not each.is_floating_point() or (kernel and each.dtype not in DTYPES):
            allowed = ", ".join(map(str, DTYPES)) if kernel else "floating-point"
            raise ValueError(f"{name} must be {allowed}, got {each.dtype}")
        if each.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {each.device}")
    if any(stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape, strict=True)):
        raise ValueError(f"state must have its own memory for every element, got the strides {state.stride()}")


def _check_indices(inputs: StateUpdateInputs, indices: torch.Tensor | None) -> None:
    batch, num_states = len(inputs.x), len(inputs.state)
    if indices is None:
        if num_states != batch:
            raise ValueError(f"state must have the {batch} rows of x, or state_batch_indices, got {num_states} rows")
        return
    if indices.shape != (batch,) or indices.dtype not in {torch.int32, torch.int64}:
        raise ValueError(
            f"state_batch_indices must be {batch} of int32 or int64, got {indices.dtype} of the shape "
            f"{tuple(indices.shape)}"
        )
    if indices.device != inputs.x.device:
        raise ValueError(f"state_batch_indices must be on x's device {inputs.x.device}, got {indices.device}")
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        ids = indices.tolist()
        if len(set(ids)) < batch or not set(ids) <= set(range(num_states)):
            raise ValueError(f"state_batch_indices must be different ones from 0 to {num_states - 1}, got {ids}")
