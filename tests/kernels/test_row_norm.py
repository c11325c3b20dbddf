"""Row norms against float64, in torch and under the interpreter: every shape, layout and magnitude."""

import math

import pytest
import torch
import triton

from automodel_kernels import row_norm
from automodel_kernels.hardware import TARGETS, nearest_target
from automodel_kernels.row_norm import row_norm_summary, row_squared_norms, row_squared_norms_reference
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.policy import tuning_policy
from kernel_memory import Guarded
from tensor_sizes import LargestTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INF, NAN = math.inf, math.nan


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside(values, fill=NAN):
    """The matrix as part of a larger one that holds `fill`, at an address and with a row stride that fit nothing."""
    rows, cols = values.shape
    base = torch.full((rows + 2, cols + 6), fill).to(values.dtype)
    base[1:-1, 3:-3] = values
    return base[1:-1, 3:-3]


def stepped(values):
    base = torch.full((values.shape[0], 2 * values.shape[1]), NAN).to(values.dtype)
    base[:, ::2] = values
    return base[:, ::2]


LAYOUTS = {
    "contiguous": lambda x: x,
    "inside": inside,
    "stepped": stepped,
    "transposed": lambda x: x.t().contiguous().t(),
    "repeated rows": lambda x: x[:1].expand(x.shape),
}
SHAPES = [(1, 1), (3, 16), (9, 33), (4, 1040), (6, 1027), (2, 5000)]
MAGNITUDES = [1.0, 0.0, 1e-3, 1e-8, 1e-20, 1e-30, 1e-38, 1e-40, 1e-44, 1e10, 1e19, 1e20, 1e30, 1e37]


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def path(request):
    """The test twice: in torch, and with the kernel under the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("narrow_floats")
    return request.param


on_both_paths = pytest.mark.usefixtures("path")


def check(x, *, tolerance=2e-6):
    """Every row's norm by itself against float64, so that no row hides behind a larger one."""
    norms, expected = row_squared_norms(x), row_squared_norms_reference(x)
    assert norms.dtype == torch.float64
    assert norms.shape == expected.shape
    assert norms.device == x.device
    torch.testing.assert_close(norms, expected, rtol=tolerance, atol=0, equal_nan=True)
    return norms


@on_both_paths
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_match_float64(dtype, shape):
    check(normal(*shape, dtype=dtype))


@on_both_paths
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_are_read_and_nothing_outside(dtype, layout):
    x = normal(7, 1030, dtype=dtype)
    matrix = LAYOUTS[layout](x)
    norms = check(matrix)
    if layout != "repeated rows":
        torch.testing.assert_close(norms, row_squared_norms(x), rtol=1e-6, atol=0)


@on_both_paths
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_a_matrix_without_elements_has_zero_norms(shape):
    assert torch.equal(row_squared_norms(torch.empty(shape)), torch.zeros(shape[0], dtype=torch.float64))


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [3, 1040])
def test_no_magnitude_overflows_or_vanishes(dtype, cols):
    x = (normal(len(MAGNITUDES), cols, dtype=torch.float64) * torch.tensor(MAGNITUDES)[:, None]).to(dtype)
    norms = check(x)
    assert norms.isfinite().all()
    assert torch.equal(norms > 0, (x != 0).any(1))


@on_both_paths
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_a_data_type(dtype):
    info = torch.finfo(dtype)
    ends = torch.tensor([info.max, -info.max, info.smallest_normal, info.smallest_normal * info.eps]).to(dtype)
    check(ends[:, None].expand(4, 9))
    check(ends.view(torch.uint8).view(dtype).reshape(4, 1))


@on_both_paths
@pytest.mark.parametrize("large", [1e20, 1e30, 3e38])
def test_one_large_value_among_small_ones(large):
    x = normal(5, 300)
    x[0, 7], x[3, 299], x[4, 0] = large, -large, 1e-30
    check(x)


@on_both_paths
def test_a_sum_near_the_thresholds_is_right_on_both_sides():
    smallest = (1e-15 / 4) ** 0.5
    values = [smallest * each for each in (0.99, 1.0, 1.01)] + [2.0**63 * each for each in (0.99, 1.0, 1.01, 1.5)]
    check(torch.tensor(values)[:, None].expand(-1, 4).contiguous())


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_nan_and_inf_propagate_from_their_rows_only(dtype):
    x = normal(8, 70, dtype=dtype)
    for row, col, value in [(1, 0, NAN), (2, 69, INF), (4, 3, -INF), (5, 3, NAN), (5, 4, INF), (6, 60, NAN)]:
        x[row, col] = value
    norms = check(x)
    assert norms.isnan().nonzero().flatten().tolist() == [1, 5, 6]
    assert norms.isinf().nonzero().flatten().tolist() == [2, 4]
    # Beside a row that is read again, too.
    x[3] = 0
    check(x)


@on_both_paths
def test_equal_values_do_not_add_up_an_error():
    for value in (0.1, 0.7):
        check(torch.full((2, 20_000), value), tolerance=1e-5)


@on_both_paths
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_of_column_shards_add_up(scale):
    x = normal(6, 1000) * scale
    parts = [row_squared_norms(part) for part in x.split([400, 1, 0, 599], dim=1)]
    torch.testing.assert_close(sum(parts), row_squared_norms_reference(x), rtol=2e-6, atol=0)


@on_both_paths
@pytest.mark.parametrize("cols", [64, 67])
def test_a_row_has_the_same_bits_wherever_it_stands_and_whenever_it_is_added(cols):
    x = normal(9, cols, dtype=torch.bfloat16)
    x[2], x[5] = 1e-30, 1e30
    norms = row_squared_norms(x)
    assert torch.equal(row_squared_norms(x), norms)
    assert torch.equal(row_squared_norms(x.flip(0)).flip(0), norms)
    assert torch.equal(row_squared_norms(x[1:6].contiguous()), norms[1:6])


@on_both_paths
def test_offsets_beyond_32_bits_reach_their_row():
    # Two gigabytes that are reserved and never touched, but for three rows.
    stride = 1 << 30
    base = torch.empty(2 * stride + 16, dtype=torch.float8_e5m2)
    x = base.as_strided((3, 16), (stride, 1))
    x.copy_(normal(3, 16))
    check(x)


@on_both_paths
def test_a_summary_has_the_extremes_of_the_finite_norms():
    x = normal(9, 40)
    x[1, 3], x[4, 4], x[6] = NAN, INF, 0
    x[7] *= 1e30
    summary = row_norm_summary(x)
    expected = row_squared_norms_reference(x)
    torch.testing.assert_close(summary.squared_norms, expected, rtol=2e-6, atol=0, equal_nan=True)
    assert summary.smallest.item() == 0
    assert summary.largest.item() == pytest.approx(expected[7].item(), rel=2e-6)
    assert summary.nonfinite.item() == 2


@on_both_paths
@pytest.mark.parametrize("x", [torch.empty(0, 4), torch.full((3, 4), NAN)], ids=["no row", "no finite row"])
def test_a_summary_without_finite_rows_is_neutral(x):
    summary = row_norm_summary(x)
    assert summary.smallest.item() == INF
    assert summary.largest.item() == -INF
    assert summary.nonfinite.item() == x.shape[0]


@on_both_paths
def test_no_gradient_is_recorded():
    weight = torch.nn.Parameter(normal(3, 4))
    assert not row_squared_norms(weight).requires_grad
    assert not row_norm_summary(weight).smallest.requires_grad


@pytest.mark.interpreter
@pytest.mark.usefixtures("narrow_floats", "poison")
@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (10, 2048)), (torch.float32, (7, 1001))])
def test_one_launch_reads_the_matrix_once(traffic, dtype, shape):
    x = normal(*shape, dtype=dtype)
    row_norm_summary(x)
    (launch,) = traffic
    assert launch.loads.requested_bytes == launch.loaded("x_ptr") == x.numel() * x.element_size()
    assert launch.stores.requested_bytes == launch.stored("norms_ptr") == 8 * shape[0]


@pytest.mark.interpreter
def test_only_the_programs_of_extreme_rows_read_again(traffic):
    x = normal(40, 64)
    x[17] = 1e-30
    check(x)
    (launch,) = traffic
    rows = 4
    assert launch.loads.requested_bytes == (40 + 2 * rows) * 64 * 4


@pytest.mark.interpreter
@pytest.mark.parametrize("num_rows", [1, 3, 4, 9])
def test_nothing_is_written_beside_the_norms(num_rows):
    x, norms = normal(num_rows, 50), Guarded(torch.zeros(num_rows, dtype=torch.float64))
    row_norm.row_squared_norms_kernel.fn[(triton.cdiv(num_rows, 4),)](
        x, norms.tensor, num_rows, 50, 50, 1, ALIGNED=False, BLOCK_M=4, BLOCK_N=32
    )
    norms.check()
    torch.testing.assert_close(norms.tensor, row_squared_norms_reference(x), rtol=2e-6, atol=0)


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["one pass", "two passes"])
@pytest.mark.parametrize("shape", [(1500, 1024), (1, 1_500_000), (600_000, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_torch_path_makes_no_large_temporary(shape, scale, transposed):
    x = torch.full(shape, scale, dtype=torch.bfloat16)
    x = x.t().contiguous().t() if transposed else x
    with LargestTensor() as largest:
        norms = row_squared_norms(x)
    assert norms[-1].item() == pytest.approx(shape[1] * scale, rel=1e-5)
    assert largest.nbytes <= max(4 << 20, 8 * shape[0])


def test_shapes_and_strides_share_one_binary_per_data_type_and_alignment(triton_cache):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    with target_driver("sm_90") as driver:
        for x in (empty(151_936, 4096), empty(1, 16), empty(64, 4096)[:, :1024], empty(2_000_000_000, 64)):
            row_squared_norms(x)
        assert len(driver.compiled) == 1
        for x in (empty(3, 1), empty(70, 1001), empty(16, 64).t(), empty(9, 64)[:, 1:], empty(1, 3)):
            row_squared_norms(x)
        assert len(driver.compiled) == 2
        row_squared_norms(empty(64, 64, dtype=torch.float16))
        assert len(driver.compiled) == 3
        assert [launch.grid[0] for launch in driver.launches[:2]] == [151_936 // 4, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_aligned_rows_are_loaded_16_bytes_at_a_time(triton_cache, dtype):
    x, norms = (torch.empty(64, 64, dtype=each, device="meta") for each in (dtype, torch.float64))
    ptx = {}
    for aligned in (True, False):
        config = spaces.ROW_NORM.get(TARGETS["sm_90"], dtype=dtype, flags={"ALIGNED": aligned}).configs[0]
        with target_driver("sm_90"):
            binary = row_norm.row_squared_norms_kernel.fn.run(
                x, norms, 64, 64, 64, 1, ALIGNED=aligned, grid=(1,), warmup=True, **config.options
            )
        ptx[aligned] = [line for line in binary.asm["ptx"].splitlines() if "ld.global" in line]
    assert ptx[True]
    assert all(".v4.b32" in line for line in ptx[True])
    assert not any(".v4.b32" in line for line in ptx[False])


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=["A100", "RTX 3090"])
def test_a_gpu_without_a_data_type_refuses_it_by_name(triton_cache, capability):
    x = torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="meta")
    target = nearest_target(capability=capability, shared_memory=101_376 if capability == (8, 6) else 166_912)
    message = rf"x is float8_e4m3fn, which this GPU \(target {target.name}\) does not have; .* it has float8_e5m2$"
    with target_driver(target) as driver:
        with pytest.raises(ValueError, match=message):
            row_squared_norms(x)
        assert not driver.launches
        row_squared_norms(x.view(torch.float8_e5m2))
        assert len(driver.launches) == 1


@on_both_paths
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"x must be 2-D, \[rows, cols\], got the shape \(4,\)"),
        (torch.zeros(1, 2, 3), "x must be 2-D"),
        (torch.zeros(2, 2, dtype=torch.float64), "x must be one of bfloat16, .*, got float64"),
        (torch.zeros(2, 2, dtype=torch.int8), "got int8"),
        (torch.zeros(2, 2, dtype=torch.complex64), "got complex64"),
        (torch.zeros(2, 2).to(torch.float8_e4m3fnuz), "got float8_e4m3fnuz"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_has_no_row_norms_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        row_squared_norms(x)


def test_a_tensor_without_data_is_refused():
    with pytest.raises(ValueError, match="x must hold data, got a meta tensor"):
        row_squared_norms(torch.empty(2, 2, device="meta"))


@pytest.mark.usefixtures("triton_cache")
def test_one_tuning_and_its_binaries_serve_every_shape():
    base = torch.empty(64, 1040, dtype=torch.bfloat16)
    with target_driver("sm_90") as driver, tuning_policy("tune"):
        row_squared_norms(base)
        counts = driver.measured, len(driver.binaries)
        assert counts == (3, 3)
        for x in (base[:1], base[::3, 16:32], torch.empty(7, 4096, dtype=torch.bfloat16)):
            row_squared_norms(x)
        assert (driver.measured, len(driver.binaries)) == counts
        row_squared_norms(base[:, 1:])
        assert (driver.measured, len(driver.binaries)) == (3, 4), "unaligned rows have one candidate"
