"""The examples of `selective_state_update`, what it costs, and its registration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from automodel_kernels.ssd.state_update import (
    StateUpdateInputs,
    launch_state_update,
    selective_state_update,
    selective_state_update_reference,
    state_update_kernel,
)
from automodel_kernels.tuning.recording import kernel_launches, record_launches
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Op, register

if TYPE_CHECKING:
    from automodel_kernels.tuning.registry import Launch

__all__ = ["SSD_STATE_UPDATE"]


def _example(
    dtype: torch.dtype,
    *,
    state_dtype: torch.dtype,
    batch: int,
    heads: int,
    head_dim: int,
    groups: int = 1,
    state: int,
    full: bool = True,
    tied: bool = True,
    indexed: bool = False,
    large: bool = False,
) -> Example:
    """Inputs as a decoding layer makes them; `full` with D, z, dt_bias and softplus."""

    def inputs(device: torch.device) -> dict[str, Any]:
        place = device if large or device.type == "meta" else torch.device("cpu")
        generator = None if place.type == "meta" else torch.Generator(place).manual_seed(0)

        def normal(*shape: int, of: torch.dtype) -> torch.Tensor:
            made = torch.empty(shape, dtype=of if large else torch.float32, device=place)
            return made.normal_(generator=generator).to(device, of) if generator else made.to(device, of)

        fp32, width, depth = torch.float32, 1 if tied else head_dim, 1 if tied else state
        rows = batch + 2 if indexed else batch
        dt, bias = normal(batch, heads, width, of=dtype), normal(heads, width, of=fp32)
        return {
            "state": normal(rows, heads, head_dim, state, of=state_dtype),
            "x": normal(batch, heads, head_dim, of=dtype),
            "dt": (dt if full else dt.abs()).expand(-1, -1, head_dim),
            "A": (-normal(heads, width, depth, of=fp32).exp()).expand(-1, head_dim, state),
            "B": normal(batch, groups, state, of=dtype),
            "C": normal(batch, groups, state, of=dtype),
            "D": normal(heads, 1, of=fp32).expand(-1, head_dim) if full else None,
            "z": normal(batch, heads, head_dim, of=dtype) if full else None,
            "dt_bias": bias.expand(-1, head_dim) if full else None,
            "dt_softplus": full,
            "state_batch_indices": torch.arange(rows, 2, -1, device=device) - 1 if indexed else None,
        }

    names = (str(each).removeprefix("torch.") for each in (dtype, state_dtype))
    words = f"{' state '.join(names)} {batch}xH{heads} P{head_dim} G{groups} N{state}"
    flags = {"full": full, "tied": tied, "indexed": indexed}
    label = " ".join([words, *(name for name, there in flags.items() if there)])
    least = max(torch.finfo(each).eps for each in (dtype, state_dtype))
    return Example(label=label, inputs=inputs, tolerance=max(1e-6, least), large=large)


def _examples() -> list[Example]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _example(bf16, state_dtype=bf16, batch=2, heads=4, head_dim=64, groups=2, state=128),
        _example(bf16, state_dtype=fp32, batch=2, heads=2, head_dim=64, state=128),
        _example(fp16, state_dtype=fp16, batch=1, heads=2, head_dim=32, state=64, indexed=True),
        _example(fp32, state_dtype=fp32, batch=3, heads=2, head_dim=16, state=256),
        _example(fp32, state_dtype=fp32, batch=2, heads=1, head_dim=50, state=20, tied=False),
        _example(fp32, state_dtype=fp32, batch=1, heads=3, head_dim=40, state=16, full=False),
        _example(bf16, state_dtype=bf16, batch=128, heads=80, head_dim=64, state=128, large=True),
        _example(bf16, state_dtype=fp32, batch=1, heads=80, head_dim=64, state=128, large=True),
    ]


def _run(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return selective_state_update(**inputs), inputs["state"]


def _run_reference(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return selective_state_update_reference(**inputs), inputs["state"]


def _cost(*, state: torch.Tensor, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **_: Any) -> Cost:
    rows = x.shape[0] * state[:1].numel() * state.element_size()
    others = sum(each.numel() * each.element_size() for each in (x, x, B, C))
    return Cost(moved_bytes=2 * rows + others)


@functools.cache
def _launches() -> list[Launch]:
    recorded = []
    for example in _examples():
        given = example.inputs(torch.device("meta"))
        options = {name: given.pop(name) for name in ("dt_softplus", "state_batch_indices")}
        recorded += record_launches(
            functools.partial(launch_state_update, StateUpdateInputs.with_heads(**given), **options)
        )
    return kernel_launches(state_update_kernel, recorded)


SSD_STATE_UPDATE = register(
    Op(
        name="ssd_state_update",
        kernels=(Kernel(function=state_update_kernel, launches=_launches),),
        run=_run,
        reference=_run_reference,
        examples=_examples,
        cost=_cost,
    )
)
