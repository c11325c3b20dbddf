"""Small operators over real kernels, registered nowhere, on which the kernels' foundation is tested."""

from __future__ import annotations

import os
import signal

import torch
import triton
import triton.language as tl

from automodel_kernels.hardware import current_target, runs_triton
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Launch, Op
from automodel_kernels.tuning.spaces import Candidates, Config, Space

__all__ = [
    "SCALE",
    "SCALE_SPACE",
    "crash_kernel",
    "greedy_kernel",
    "greedy_op",
    "scale",
    "scale_kernel",
    "scale_reference",
]

FACTOR_BIAS = tl.constexpr(0.0)


@triton.jit
def scaled(x, factor):
    return x * factor + FACTOR_BIAS


@triton.jit(do_not_specialize=["num_elements", "factor"])
def scale_kernel(
    x_ptr,
    out_ptr,
    num_elements,
    factor,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if SQUARE:
        x = x * x
    tl.store(out_ptr + offs, scaled(x, factor).to(out_ptr.dtype.element_ty), mask=mask)


class Crashing(triton.runtime.JITFunction):
    """A kernel whose compiler ends its process for CODE 1, hangs for 2 and raises for 3."""

    def run(self, *arguments, **options):
        code = options["CODE"]
        if code == 1:
            os.write(2, b"last words of the compiler\n")
            os.abort()
        if code == 2:
            signal.pause()
        if code == 3:
            raise ValueError("the source\nthe reason\n")
        return super().run(*arguments, **options)


@Crashing
def crash_kernel(x_ptr, CODE: tl.constexpr):
    tl.store(x_ptr, CODE)


@triton.jit
def greedy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Needs BLOCK * BLOCK * 4 bytes of registers or stack, and about as much shared memory."""
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]
    x = tl.load(x_ptr + tile)
    total = tl.dot(x, x)
    for _ in range(4):
        total = tl.dot(total.to(x.dtype), x) + tl.trans(total)
    tl.store(out_ptr + tile, total)


SCALE_SPACE = Space(
    name="scale",
    candidates=(
        Candidates(
            configs=(Config(meta={"BLOCK": 256}, num_warps=2), Config(meta={"BLOCK": 1024}, num_warps=4)),
            flags={"SQUARE": True},
        ),
        Candidates(configs=(Config(meta={"BLOCK": 128}, num_warps=1),)),
    ),
)


def scale(x: torch.Tensor, *, factor: float, square: bool = False) -> torch.Tensor:
    """factor * x, or factor * x * x, in x's dtype; x is contiguous."""
    if not runs_triton(x.device):
        return scale_reference(x, factor=factor, square=square)
    out = torch.empty_like(x)
    config = SCALE_SPACE.default(current_target(x.device), dtype=x.dtype, flags={"SQUARE": square})
    grid = (triton.cdiv(x.numel(), config.meta["BLOCK"]),)
    scale_kernel[grid](x, out, x.numel(), factor, SQUARE=square, **config.options)
    return out


def scale_reference(x: torch.Tensor, *, factor: float, square: bool = False) -> torch.Tensor:
    return (x * x if square else x) * factor


def _launches():
    return [
        Launch(
            label=f"{str(dtype).removeprefix('torch.')}{' square' if square else ''}",
            dtype=dtype,
            arguments={"x_ptr": dtype, "out_ptr": dtype, "num_elements": 1000, "factor": 0.5, "SQUARE": square},
        )
        for dtype in (torch.float32, torch.bfloat16)
        for square in (False, True)
    ]


def _example(*, square, elements, large=False):
    def inputs(device):
        generator = torch.Generator().manual_seed(elements)
        x = torch.randn(elements, generator=generator).to(torch.bfloat16)
        return {"x": x.to(device), "factor": 0.3, "square": square}

    return Example(label=f"{elements} square={square}", inputs=inputs, tolerance=4e-3, large=large)


SCALE = Op(
    name="scale",
    kernels=(Kernel(function=scale_kernel, space=SCALE_SPACE, launches=_launches),),
    run=scale,
    reference=scale_reference,
    examples=lambda: [_example(square=False, elements=1000), _example(square=True, elements=777)],
    cost=lambda x, *, factor, square: Cost(moved_bytes=2 * x.numel() * x.element_size()),
)


def greedy_op(*, accepted_stack: int = 0, targets=("sm_89",), num_warps: int = 2, block: int = 128) -> Op:
    """An operator whose space claims more than its kernel can keep."""
    config = Config(meta={"BLOCK": block}, num_warps=num_warps, num_stages=1)
    candidates = Candidates(configs=(config,), targets=tuple(targets), accepted_stack=accepted_stack)
    launch = Launch(label="float16", dtype=torch.float16, arguments={"x_ptr": torch.float16, "out_ptr": torch.float32})
    kernel = Kernel(
        function=greedy_kernel, space=Space(name="greedy", candidates=(candidates,)), launches=lambda: [launch]
    )
    return Op(
        name="greedy",
        kernels=(kernel,),
        run=scale,
        reference=scale_reference,
        examples=list,
        cost=lambda: Cost(moved_bytes=0),
    )
