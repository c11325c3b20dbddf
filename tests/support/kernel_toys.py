"""Small operators over real kernels, registered nowhere, on which the kernels' foundation is tested."""

from __future__ import annotations

import os
import signal

import torch
import triton
import triton.language as tl

from automodel_kernels.hardware import runs_triton
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.candidates import Candidates, Config, Space
from automodel_kernels.tuning.registry import Cost, Example, Kernel, Launch, Op

__all__ = [
    "SCALE",
    "SCALE_SPACE",
    "SUM_SPACE",
    "add_sum",
    "crash_kernel",
    "greedy_kernel",
    "greedy_op",
    "scale",
    "scale_kernel",
    "scale_reference",
    "sum_kernel",
    "tuned_sum",
]

FACTOR_BIAS = tl.constexpr(0.0)


@triton.jit
def scaled(x, factor):
    return x * factor + FACTOR_BIAS


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


@tuned(space=SCALE_SPACE, key=("x_ptr", "SQUARE"), outputs=("out_ptr",))
@triton.jit(do_not_specialize=["x_ptr", "out_ptr", "num_elements", "factor"])
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


LARGEST_BLOCK = tl.constexpr(1024)

SUM_SPACE = Space(
    name="sum",
    candidates=(
        Candidates(
            configs=(
                Config(meta={"BLOCK": 64}, num_warps=1),
                Config(meta={"BLOCK": 128}, num_warps=1),
                Config(meta={"BLOCK": 2048}, num_warps=4),
                Config(meta={"BLOCK": 64}, num_warps=2),
            ),
        ),
    ),
)


@triton.jit(do_not_specialize=["x_ptr", "total_ptr", "num_elements", "stride_x"])
def sum_kernel(
    x_ptr,
    total_ptr,
    num_elements,
    stride_x,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds to total_ptr[0]. The order of the sum, and so its bits, depend on BLOCK; the third configuration fails."""
    tl.static_assert(BLOCK <= LARGEST_BLOCK, "the block is too large")
    offs = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_elements, BLOCK):
        x = tl.load(x_ptr + (start + offs) * stride_x, mask=start + offs < num_elements, other=0.0).to(tl.float32)
        sums += x * x if SQUARE else x
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(sums, axis=0))


def tuned_sum(*, tables=None, space=SUM_SPACE):
    """The kernel, decorated anew: it has forgotten every choice."""
    more = {} if tables is None else {"tables": lambda: tables}
    return tuned(space=space, key=("x_ptr", "SQUARE"), restores=("total_ptr",), **more)(sum_kernel)


def add_sum(kernel, x, total, *, square=False):
    """total[0] += the sum of x, or of its squares."""
    kernel[(1,)](x, total, x.numel(), x.stride(0), SQUARE=square)


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


@triton.jit(do_not_specialize=["x_ptr", "out_ptr"])
def greedy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Needs BLOCK * BLOCK * 4 bytes of registers or stack, and about as much shared memory."""
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]
    x = tl.load(tl.multiple_of(tl.max_contiguous(x_ptr + tile, (1, BLOCK)), (1, 16)))
    total = tl.dot(x, x)
    for _ in range(4):
        total = tl.dot(total.to(x.dtype), x) + tl.trans(total)
    tl.store(tl.multiple_of(tl.max_contiguous(out_ptr + tile, (1, BLOCK)), (1, 16)), total)


def scale(x: torch.Tensor, *, factor: float, square: bool = False) -> torch.Tensor:
    """factor * x, or factor * x * x, in x's dtype; x is contiguous."""
    if not runs_triton(x.device):
        return scale_reference(x, factor=factor, square=square)
    out = torch.empty_like(x)
    scale_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), factor, SQUARE=square)
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
    kernels=(Kernel(function=scale_kernel, launches=_launches),),
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
    function = tuned(space=Space(name="greedy", candidates=(candidates,)), key=("x_ptr",), outputs=("out_ptr",))(
        greedy_kernel
    )
    kernel = Kernel(function=function, launches=lambda: [launch])
    return Op(
        name="greedy",
        kernels=(kernel,),
        run=scale,
        reference=scale_reference,
        examples=list,
        cost=lambda: Cost(moved_bytes=0),
    )
