"""How a kernel is tested without a GPU: mark the tests `interpreter`, and run them like any other."""

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.interpreter


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (x + y).to(out_ptr.dtype.element_ty), mask=mask)


@pytest.mark.parametrize("num_elements", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_vector_add_matches_torch_and_stays_inside_its_output(num_elements, dtype):
    generator = torch.Generator().manual_seed(num_elements)
    x = torch.randn(num_elements, generator=generator).to(dtype)
    y = torch.randn(num_elements, generator=generator).to(dtype)
    out = torch.full((num_elements + 32,), 7.0, dtype=dtype)
    add_kernel[(triton.cdiv(num_elements, 32),)](x, y, out, num_elements, BLOCK=32)
    assert torch.equal(out[:num_elements], x + y)
    assert torch.equal(out[num_elements:], torch.full((32,), 7.0, dtype=dtype))


def test_this_process_is_the_interpreters():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert type(add_kernel).__name__ == "InterpretedFunction"
