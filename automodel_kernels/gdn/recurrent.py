"""The gated delta rule one token at a time, for decoding: no gradient, and a state in and out.

    S'_t = exp(g_t) S_{t-1}    d_t = beta_t (v_t - S'_t^T k_t)    S_t = S'_t + k_t d_t^T    o_t = scale S_t^T q_t

One program keeps BLOCK_V columns of one value head's state [key_dim, value_dim] in fp32 registers and walks through the
tokens of its sequence; columns are independent. Norms, the gate and the sigmoid of beta are formed there too.
Bytes: the state is read and written once, which is nearly all there is at one token; 6 key_dim * value_dim FLOPs a
token and value head. Memory is the limit, and with few sequences the number of programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from automodel_kernels.gdn.arguments import check_arguments
from automodel_kernels.gdn.chunked import gdn_forward_torch
from automodel_kernels.gdn.gates import Gates
from automodel_kernels.gdn.reference import NORM_EPSILON, accumulator_dtype
from automodel_kernels.hardware import runs_triton
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import tensors_aligned

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["fused_recurrent_gated_delta_rule", "gdn_recurrent", "gdn_recurrent_kernel", "launch_recurrent"]

EPSILON = tl.constexpr(NORM_EPSILON)

# With more tokens in a row the torch path takes chunks.
MOST_STEPS = 4


@tuned(
    space=spaces.GDN_RECURRENT,
    key=("q_ptr", "BLOCK_K", "ALIGNED"),
    outputs=("o_ptr", "final_ptr"),
)
@triton.jit(
    do_not_specialize=[
        "q_ptr",
        "k_ptr",
        "v_ptr",
        "g_ptr",
        "beta_ptr",
        "A_log_ptr",
        "dt_bias_ptr",
        "initial_ptr",
        "cu_seqlens_ptr",
        "o_ptr",
        "final_ptr",
        "scale",
        "seqlen",
        "heads",
        "value_heads",
        "key_dim",
        "value_dim",
        "stride_q_row",
        "stride_q_token",
        "stride_q_head",
        "stride_k_row",
        "stride_k_token",
        "stride_k_head",
        "stride_v_row",
        "stride_v_token",
        "stride_v_head",
        "stride_g_row",
        "stride_g_token",
        "stride_g_head",
        "stride_beta_row",
        "stride_beta_token",
        "stride_beta_head",
    ]
)
def gdn_recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    initial_ptr,
    cu_seqlens_ptr,
    o_ptr,
    final_ptr,
    scale,
    seqlen,
    heads,
    value_heads,
    key_dim,
    value_dim,
    stride_q_row,
    stride_q_token,
    stride_q_head,
    stride_k_row,
    stride_k_token,
    stride_k_head,
    stride_v_row,
    stride_v_token,
    stride_v_head,
    stride_g_row,
    stride_g_token,
    stride_g_head,
    stride_beta_row,
    stride_beta_token,
    stride_beta_head,
    VARLEN: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    L2NORM: tl.constexpr,
    GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program is BLOCK_V columns of one value head of one sequence."""
    pid_v = tl.program_id(0).to(tl.int64)
    pid_state = tl.program_id(1).to(tl.int64)
    seq = pid_state // value_heads
    value_head = pid_state % value_heads
    head = value_head // (value_heads // heads)
    if VARLEN:
        row = seq * 0
        begin = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        count = (tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        row = seq
        begin = seq * 0
        count = seqlen
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    if ALIGNED:
        # It is a multiple of 8, and the compiler must see it to move 16 bytes of the state at a time.
        value_dim = value_dim // 8 * 8
    mask_k = offs_k < key_dim
    mask_v = offs_v < value_dim
    mask_state = mask_k[:, None] & mask_v[None, :]
    offs_state = (pid_state * key_dim + offs_k[:, None]) * value_dim + offs_v[None, :]
    if ALIGNED:
        offs_state = tl.multiple_of(tl.max_contiguous(offs_state, (1, BLOCK_V)), (1, 8))
    if HAS_INITIAL:
        state = tl.load(initial_ptr + offs_state, mask=mask_state, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    q_ptrs = q_ptr + row * stride_q_row + begin * stride_q_token + head * stride_q_head + offs_k
    k_ptrs = k_ptr + row * stride_k_row + begin * stride_k_token + head * stride_k_head + offs_k
    v_ptrs = v_ptr + row * stride_v_row + begin * stride_v_token + value_head * stride_v_head + offs_v
    g_at = g_ptr + row * stride_g_row + begin * stride_g_token + value_head * stride_g_head
    beta_at = beta_ptr + row * stride_beta_row + begin * stride_beta_token + value_head * stride_beta_head
    o_ptrs = o_ptr + ((row * seqlen + begin) * value_heads + value_head) * value_dim + offs_v
    stride_o_token = value_heads.to(tl.int64) * value_dim
    if GATE:
        rate = -tl.exp(tl.load(A_log_ptr + value_head).to(tl.float32))
        shift = tl.load(dt_bias_ptr + value_head).to(tl.float32) if HAS_DT_BIAS else 0.0
    for _ in range(count):
        q = tl.load(q_ptrs, mask=mask_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs, mask=mask_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptrs, mask=mask_v, other=0.0).to(tl.float32)
        g = tl.load(g_at).to(tl.float32)
        beta = tl.load(beta_at).to(tl.float32)
        if L2NORM:
            q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPSILON)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPSILON)
        if GATE:
            g = g + shift
            g = rate * (tl.maximum(g, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(g))))
        if BETA_SIGMOID:
            beta = tl.sigmoid(beta)
            if DOUBLE_BETA:
                beta = 2.0 * beta
        state = state * tl.exp(g)
        correction = beta * (v - tl.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * correction[None, :]
        o = scale * tl.sum(state * q[:, None], axis=0)
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask_v)
        q_ptrs += stride_q_token
        k_ptrs += stride_k_token
        v_ptrs += stride_v_token
        g_at += stride_g_token
        beta_at += stride_beta_token
        o_ptrs += stride_o_token
    if STORE_FINAL:
        tl.store(final_ptr + offs_state, state, mask=mask_state)


def launch_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    need_final: bool,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    gates: Gates,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel; arguments and results as of `gdn_recurrent`."""
    q, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v))
    batch, seqlen, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial = None if initial_state is None else initial_state.contiguous()
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = (sequences, value_heads, key_dim, value_dim) if need_final else (0,)
    final = torch.empty(states, dtype=torch.float32, device=v.device)

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        return triton.cdiv(value_dim, meta["BLOCK_V"]), sequences * value_heads

    if not sequences:
        return o, final
    gdn_recurrent_kernel[grid](
        q,
        k,
        v,
        g,
        beta,
        g if gates.A_log is None else gates.A_log,
        g if gates.dt_bias is None else gates.dt_bias,
        final if initial is None else initial,
        q if cu_seqlens is None else cu_seqlens,
        o,
        final,
        scale,
        seqlen,
        heads,
        value_heads,
        key_dim,
        value_dim,
        # Of row, token and head.
        *(stride for each in (q, k, v, g, beta) for stride in each.stride()[:3]),
        VARLEN=cu_seqlens is not None,
        HAS_INITIAL=initial is not None,
        STORE_FINAL=need_final,
        L2NORM=l2norm,
        GATE=gates.A_log is not None,
        HAS_DT_BIAS=gates.dt_bias is not None,
        BETA_SIGMOID=gates.beta_sigmoid,
        DOUBLE_BETA=gates.double_beta,
        ALIGNED=value_dim % 8 == 0 and tensors_aligned(initial, final),
        BLOCK_K=triton.next_power_of_2(key_dim),
    )
    return o, final


def _torch_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    gates: Gates,
) -> tuple[torch.Tensor, torch.Tensor]:
    if cu_seqlens is not None or q.shape[1] > MOST_STEPS:
        options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "l2norm": l2norm}
        result = gdn_forward_torch(q, k, v, g, beta, **options, cu_seqlens=cu_seqlens, chunk_size=64, gates=gates)
        return result.o, result.final_state
    dtype = accumulator_dtype(q, k, v, g, beta)
    batch, _, heads, key_dim = q.shape
    groups = (heads, v.shape[2] // heads)
    state = v.new_zeros(batch, v.shape[2], key_dim, v.shape[3], dtype=dtype)
    if initial_state is not None:
        state.copy_(initial_state)
    decays, strengths = gates.apply(g, beta, dtype=dtype)
    # Value heads of one group lie side by side, so that queries and keys are broadcast and not repeated.
    grouped = state.unflatten(1, groups)
    queries, keys = (each.to(dtype)[:, :, :, None, None] for each in (q, k))
    if l2norm:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in (queries, keys))
    decays, strengths = (each.to(dtype).unflatten(2, groups)[..., None, None] for each in (decays.exp(), strengths))
    values = v.to(dtype).unflatten(2, groups)[..., None, :]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for t in range(v.shape[1]):
        grouped.mul_(decays[:, t])
        correction = (values[:, t] - keys[:, t] @ grouped).mul_(strengths[:, t])
        grouped.addcmul_(keys[:, t].mT, correction)
        o[:, t] = (queries[:, t] @ grouped).mul_(scale).flatten(1, 3)
    return o, state


@torch.library.custom_op("automodel_kernels::gdn_recurrent", mutates_args=())
def gdn_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    need_final: bool,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    beta_sigmoid: bool,
    double_beta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and the final states (empty unless they are needed); nothing is checked, and no gradient."""
    gates = Gates(A_log=A_log, dt_bias=dt_bias, beta_sigmoid=beta_sigmoid, double_beta=double_beta)
    options: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "l2norm": l2norm,
        "cu_seqlens": cu_seqlens,
        "gates": gates,
    }
    # The kernel computes in float32.
    if runs_triton(q.device) and accumulator_dtype(q, k, v, g, beta) == torch.float32:
        return launch_recurrent(q, k, v, g, beta, need_final=need_final, **options)
    o, final_state = _torch_recurrent(q, k, v, g, beta, **options)
    return o, final_state if need_final else final_state.new_empty(0)


@gdn_recurrent.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    need_final: bool,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    beta_sigmoid: bool,
    double_beta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulator_dtype(q, k, v, g, beta)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = (sequences, v.shape[2], q.shape[3], v.shape[3]) if need_final else (0,)
    return v.new_empty(v.shape), v.new_empty(states, dtype=dtype)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule token by token, for decoding: what `chunk_gated_delta_rule` computes, without a gradient.

    One call with a state per token gives what one call with all tokens gives. Arguments are of any strides, and of
    float16, bfloat16, float32 or float64, mixed as training mixes them; it is computed in float32, or in float64 if one
    of q, k, v, g and beta is.

    Args:
        q: [batch, seqlen, heads, key_dim]; key_dim is at most 256.
        k: [batch, seqlen, heads, key_dim].
        v: [batch, seqlen, value_heads, value_dim]; value_heads is a multiple of heads, value_dim at most 256.
        g: [batch, seqlen, value_heads], the logarithm of the decay; with `use_gate_in_kernel` the raw gate.
        beta: [batch, seqlen, value_heads]; with `use_beta_sigmoid_in_kernel` before its sigmoid.
        scale: of the outputs; by default key_dim**-0.5.
        initial_state: [sequences, value_heads, key_dim, value_dim]; zero by default. It is not changed.
        output_final_state: whether the states after the sequences are returned.
        use_qk_l2norm_in_kernel: whether q and k are multiplied by rsqrt(sum of squares + 1e-6).
        cu_seqlens: [documents + 1], int32 or int64: where the documents of the only row begin and the last one ends.
            A sequence is a document then, else a row; either may be empty.
        use_gate_in_kernel: whether g stands for -exp(A_log) * softplus(g + dt_bias).
        A_log: [value_heads].
        dt_bias: [value_heads]; zero by default.
        use_beta_sigmoid_in_kernel: whether beta stands for sigmoid(beta).
        allow_neg_eigval: whether that sigmoid is doubled.

    Returns:
        The outputs [batch, seqlen, value_heads, value_dim] in v's dtype, and the final states [sequences,
        value_heads, key_dim, value_dim] in float32 (float64 as above), or None.

    Raises:
        ValueError: an argument is not as above; or one requires a gradient while gradients are recorded.
    """
    check_arguments(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    for name, each in {**tensors, "A_log": A_log, "dt_bias": dt_bias}.items():
        if torch.is_grad_enabled() and each is not None and each.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and fused_recurrent_gated_delta_rule computes none: "
                "call it under torch.no_grad(), or chunk_gated_delta_rule instead"
            )
    o, final_state = gdn_recurrent(
        q,
        k,
        v,
        g,
        beta,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    return o, final_state if output_final_state else None
