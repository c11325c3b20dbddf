"""The examples of `fused_recurrent_gated_delta_rule`, what it costs, and its registration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from automodel_kernels.gdn.gates import Gates
from automodel_kernels.gdn.recurrent import fused_recurrent_gated_delta_rule, gdn_recurrent_kernel, launch_recurrent
from automodel_kernels.gdn.reference import chunk_gated_delta_rule_reference
from automodel_kernels.tuning.recording import kernel_launches, record_launches
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Op, register

if TYPE_CHECKING:
    from automodel_kernels.tuning.registry import Launch

__all__ = ["GDN_RECURRENT"]

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def _example(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int, int],
    *,
    documents: tuple[int, ...] = (),
    initial: bool = True,
    final: bool = True,
    gates: bool = False,
    large: bool = False,
) -> Example:
    """Inputs as a layer makes them: 16-bit activations and fp32 gates, q, k and v side by side in one tensor.

    Args:
        dtype: of the activations.
        shape: batch, tokens, heads, value heads, key_dim, value_dim.
        documents: lengths, for cu_seqlens.
        initial: with an initial state.
        final: whether the final state is asked for.
        gates: with the raw gate and beta, to be formed in the kernel; else they are ready, and beta is 16-bit.
        large: see `Example`.
    """
    batch, tokens, heads, value_heads, key_dim, value_dim = shape

    def inputs(device: torch.device) -> dict[str, Any]:
        meta = device.type == "meta"
        generator = None if meta else torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="meta" if meta else "cpu").normal_(generator=generator)

        widths = (heads * key_dim, heads * key_dim, value_heads * value_dim)
        activations = normal(batch, tokens, sum(widths)).to(device, dtype)
        dims = (key_dim, key_dim, value_dim)
        q, k, v = (
            each.unflatten(2, (-1, dim)) for each, dim in zip(activations.split(widths, dim=2), dims, strict=True)
        )
        raw_g, raw_beta = (normal(batch, tokens, value_heads) for _ in range(2))
        states = normal(len(documents) or batch, value_heads, key_dim, value_dim)
        borders = torch.tensor((0, *documents), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        made = {
            "q": q,
            "k": k,
            "v": v,
            "g": raw_g.to(dtype) if gates else -raw_g.abs(),
            "beta": raw_beta.to(dtype) if gates else raw_beta.sigmoid().to(dtype),
            "initial_state": states if initial else None,
            "output_final_state": final,
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": borders if documents else None,
            "use_gate_in_kernel": gates,
            "A_log": normal(value_heads) if gates else None,
            "dt_bias": normal(value_heads) if gates else None,
            "use_beta_sigmoid_in_kernel": gates,
            "allow_neg_eigval": gates,
        }
        return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in made.items()}

    flags = {"packed": documents, "initial": initial, "final": final, "gates": gates}
    words = [f"{str(dtype).removeprefix('torch.')} {batch}x{tokens} H{heads} HV{value_heads} K{key_dim} V{value_dim}"]
    label = " ".join([*words, *(name for name, there in flags.items() if there)])
    return Example(label=label, inputs=inputs, tolerance=TOLERANCES[dtype], large=large)


def _examples() -> list[Example]:
    return [
        _example(torch.bfloat16, (2, 1, 2, 4, 128, 128)),
        _example(torch.bfloat16, (1, 9, 2, 4, 128, 128), documents=(1, 0, 5, 3)),
        _example(torch.float16, (2, 3, 1, 2, 256, 256)),
        _example(torch.float16, (1, 5, 2, 2, 64, 72), gates=True),
        _example(torch.float32, (2, 6, 1, 3, 64, 64), initial=False),
        _example(torch.float32, (1, 4, 1, 1, 33, 30)),
        _example(torch.bfloat16, (1, 1, 16, 32, 128, 128), large=True),
        _example(torch.bfloat16, (128, 1, 16, 32, 128, 128), large=True),
    ]


def _cost(**inputs: Any) -> Cost:
    v, state, q = inputs["v"], inputs["initial_state"], inputs["q"]
    cu_seqlens = inputs["cu_seqlens"]
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state_bytes = 4 * sequences * v.shape[2] * q.shape[3] * v.shape[3]
    passes = (state is not None) + inputs["output_final_state"]
    read = sum(inputs[name].numel() * inputs[name].element_size() for name in ("q", "k", "v", "g", "beta"))
    flops = 6 * v.numel() * q.shape[3]
    return Cost(moved_bytes=read + v.numel() * v.element_size() + passes * state_bytes, flops=flops)


def _launches() -> list[Launch]:
    recorded = []
    for example in _examples():
        inputs = example.inputs(torch.device("meta"))
        gates = Gates(
            A_log=inputs["A_log"],
            dt_bias=inputs["dt_bias"],
            beta_sigmoid=inputs["use_beta_sigmoid_in_kernel"],
            double_beta=inputs["allow_neg_eigval"],
        )
        recorded += record_launches(
            functools.partial(
                launch_recurrent,
                *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
                scale=1.0,
                initial_state=inputs["initial_state"],
                need_final=inputs["output_final_state"],
                l2norm=True,
                cu_seqlens=inputs["cu_seqlens"],
                gates=gates,
            )
        )
    return kernel_launches(gdn_recurrent_kernel, recorded)


GDN_RECURRENT = register(
    Op(
        name="gdn_recurrent",
        kernels=(Kernel(function=gdn_recurrent_kernel, launches=_launches),),
        run=fused_recurrent_gated_delta_rule,
        reference=chunk_gated_delta_rule_reference,
        examples=_examples,
        cost=_cost,
    )
)
