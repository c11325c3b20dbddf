"""The fixtures for tests under the interpreter find what they are there to find."""

import pytest
import torch
import triton
import triton.language as tl

import kernel_toys
from automodel_kernels.tuning.accuracy import example_errors
from kernel_memory import Guarded

pytestmark = pytest.mark.interpreter


@triton.jit
def convert_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def narrow_sum_kernel(x_ptr, out_ptr):
    offs = tl.arange(0, 16)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs) + tl.load(x_ptr + offs))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tile = offs[:, None] * SIZE + offs[None, :]
    product = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile))
    tl.store(out_ptr + tile, product.to(out_ptr.dtype.element_ty))


@triton.jit
def overlapping_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < num_elements, other=0.0)
    tl.atomic_add(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1 + pid, tl.sum(x))


def converted(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    convert_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def interesting_floats():
    special = [
        0.0,
        -0.0,
        1.0,
        1.00390625,
        1.01171875,
        -1e30,
        3e38,
        1e-38,
        1e-40,
        float("inf"),
        float("-inf"),
        float("nan"),
    ]
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.tensor(special), torch.randn(500, generator=generator) * 3, torch.rand(500) * 1e-6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("narrow_floats")
def test_conversions_round_as_torch_does(dtype):
    x = interesting_floats()
    assert torch.equal(converted(x, dtype).nan_to_num(7), x.to(dtype).nan_to_num(7))
    back = converted(x.to(dtype), torch.float32)
    assert torch.equal(back.nan_to_num(7), x.to(dtype).float().nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.usefixtures("narrow_floats")
def test_float8_is_read_exactly_and_saturates_when_written(dtype):
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert torch.equal(converted(every, torch.float32).nan_to_num(7), every.float().nan_to_num(7))
    x = interesting_floats()
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(converted(x, dtype).float().nan_to_num(7), expected.nan_to_num(7))


def test_without_the_fixture_the_interpreter_truncates():
    x = torch.tensor([1.01171875])
    assert converted(x, torch.bfloat16).item() == 1.0078125 != x.to(torch.bfloat16).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.usefixtures("narrow_floats")
def test_arithmetic_on_narrow_floats_is_refused(dtype):
    with pytest.raises(triton.runtime.interpreter.InterpreterError, match="convert to float32 first"):
        narrow_sum_kernel[(1,)](torch.ones(16).to(dtype), torch.empty(16, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.usefixtures("narrow_floats")
def test_matrix_products_of_narrow_floats_are_exact_in_fp32(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("narrow_floats", "poison")
@pytest.mark.parametrize("example", kernel_toys.SCALE.examples(), ids=lambda example: example.label)
def test_an_operator_is_compared_with_its_reference(example):
    errors = example_errors(kernel_toys.SCALE, example, device=torch.device("cpu"))
    assert errors.keys() == {"output 0"}
    assert 0 < errors["output 0"] < example.tolerance


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_new_memory_is_poisoned(dtype):
    for tensor in (
        torch.empty(5, dtype=dtype),
        torch.empty_like(torch.ones(3, dtype=dtype)),
        torch.ones(1, dtype=dtype).new_empty(4),
        torch.empty_strided((2, 2), (2, 1), dtype=dtype),
    ):
        assert tensor.isnan().all()
    assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_poison_ends_with_the_test():
    assert not torch.are_deterministic_algorithms_enabled()


def test_traffic_counts_what_was_asked_and_what_was_touched(traffic):
    x, out = torch.ones(100), torch.zeros(8)
    overlapping_kernel[(4,)](x, out, 100, BLOCK=128)
    (launch,) = traffic
    assert launch.name == "overlapping_kernel"
    assert launch.loads.operations == 8, "four loads and the reading half of four atomic additions"
    assert launch.loads.requested_bytes == 4 * (100 * 4 + 4)
    assert launch.loaded("x_ptr") == 100 * 4
    assert launch.loads.distinct_bytes == 100 * 4 + 4
    assert launch.stores.requested_bytes == 4 * 8
    assert launch.stored("out_ptr") == launch.stores.distinct_bytes == 5 * 4
    assert launch.stored("x_ptr") == 0


def test_traffic_keeps_launches_apart(traffic):
    x = torch.randn(130)
    kernel_toys.scale(x, factor=2.0)
    kernel_toys.scale(x[:7], factor=2.0)
    assert [each.loads.distinct_bytes for each in traffic] == [130 * 4, 7 * 4]
    assert [each.stores.requested_bytes for each in traffic] == [130 * 4, 7 * 4]


@pytest.mark.parametrize(("row_gap", "column_step"), [(0, 1), (3, 1), (0, 2), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_write_outside_a_guarded_tensor_is_found(dtype, row_gap, column_step):
    values = torch.arange(15).reshape(3, 5).to(dtype)
    guarded = Guarded(values, row_gap=row_gap, column_step=column_step)
    assert torch.equal(guarded.tensor, values)
    guarded.tensor.mul_(2)
    guarded.check()
    base = guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() - 1)
    base.fill_(1)
    with pytest.raises(AssertionError, match="bytes outside the tensor were written"):
        guarded.check()


@pytest.mark.parametrize(("row_gap", "column_step"), [(3, 1), (0, 2)])
def test_a_write_into_a_gap_is_found(row_gap, column_step):
    guarded = Guarded(torch.zeros(3, 4), row_gap=row_gap, column_step=column_step)
    end = guarded.tensor.storage_offset() + (4 if row_gap else 1)
    guarded.tensor.as_strided((1,), (1,), end).fill_(1)
    with pytest.raises(AssertionError, match="4 bytes outside"):
        guarded.check()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1,), ()])
def test_odd_shapes_can_be_guarded(shape):
    guarded = Guarded(torch.ones(shape))
    guarded.tensor.fill_(2)
    guarded.check()
