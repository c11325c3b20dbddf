"""Row repair against float64, in torch and under the interpreter: values, what is written, what is refused first."""

import math

import pytest
import torch

from automodel_kernels import row_repair
from automodel_kernels.hardware import TARGETS
from automodel_kernels.row_repair import repair_rows_
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import spaces
from kernel_memory import Guarded
from tensor_sizes import LargestTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def path(request):
    """The test twice: in torch, and with the kernel under the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("narrow_floats")
    return request.param


on_both_paths = pytest.mark.usefixtures("path")


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_rows(source, ids, target_norm, source_norms=None):
    rows = source[ids].double()
    norms = torch.linalg.vector_norm(rows, dim=1) if source_norms is None else source_norms.double()
    return rows / norms[:, None] * target_norm


def check(weight, source, ids, target_norm, source_norms=None):
    """Repairs, and finds the rows as near to the exact ones as the data type allows, and all others as they were."""
    before, source_before = weight.clone(), source.clone()
    exact = exact_rows(source, ids, target_norm, source_norms)
    result = repair_rows_(weight, source, ids, target_norm, source_norms)
    assert result is weight
    nearest = exact.to(weight.dtype).double()
    # Beyond rounding once, fp32 may have lost three roundings of its own.
    allowed = (nearest - exact).abs() + 2**-22 * exact.abs() + torch.finfo(weight.dtype).smallest_normal * 2**-22
    assert ((weight[ids].double() - exact).abs() <= allowed).all()
    others = torch.ones(len(weight), dtype=torch.bool)
    others[ids] = False
    assert torch.equal(weight[others], before[others])
    if source is not weight:
        assert torch.equal(source, source_before)


@on_both_paths
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (6, 16), (5, 33), (4, 1040), (3, 2051)])
@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_direction_and_norm_rounded_once(dtype, source_dtype, rows, cols):
    weight, source = normal(rows, cols, dtype=dtype), normal(rows, cols, dtype=source_dtype, seed=1)
    ids = torch.arange(rows - 1, -1, -2)
    check(weight, source, ids, 0.7)
    norms = torch.linalg.vector_norm(weight[ids].double(), dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.7), rtol=torch.finfo(dtype).eps, atol=0)


@on_both_paths
@pytest.mark.parametrize(("row_gap", "column_step"), [(0, 1), (3, 1), (0, 2), (5, 3), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_but_the_rows_is_written(dtype, row_gap, column_step):
    guarded = Guarded(normal(6, 80, dtype=dtype), row_gap=row_gap, column_step=column_step)
    source = Guarded(normal(6, 80, dtype=dtype, seed=1), row_gap=2 * row_gap, column_step=column_step)
    check(guarded.tensor, source.tensor, torch.tensor([5, 0, 2]), 3.0)
    guarded.check()
    source.check()


@on_both_paths
def test_a_transposed_weight_is_repaired():
    weight = normal(9, 7).t()
    check(weight, normal(7, 9, seed=1), torch.tensor([6, 1]), 3.0)
    check(normal(7, 9), weight, torch.tensor([6, 1]), 3.0)


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target_norm", [1e-6, 1.0, 1e20])
def test_every_norm_can_be_scaled(dtype, target_norm):
    scales = torch.tensor([3e-40, 1e-38, 1e-30, 1.0, 1e19, 1e30, 1e37], dtype=torch.float64)
    source = (normal(7, 50).double() * scales[:, None]).to(dtype)
    check(torch.zeros(7, 50, dtype=dtype), source, torch.arange(7), target_norm)


@on_both_paths
def test_column_shards_with_full_norms_make_the_same_bits_as_whole_rows():
    source, ids = normal(8, 100, dtype=torch.bfloat16), torch.tensor([7, 2])
    source[2, :40] = 0
    whole, sharded = (torch.zeros(8, 100, dtype=torch.bfloat16) for _ in range(2))
    repair_rows_(whole, source, ids, 2.5)
    norms = torch.linalg.vector_norm(source[ids], dim=1, dtype=torch.float64)
    for left, right in [(0, 40), (40, 41), (41, 41), (41, 100)]:
        repair_rows_(sharded[:, left:right], source[:, left:right], ids, 2.5, norms)
    assert torch.equal(sharded, whole)
    assert whole[2].norm().item() == pytest.approx(2.5, rel=1e-2)


@on_both_paths
@pytest.mark.parametrize("ids", [[5, 0], (3,), torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2])], ids=str)
def test_ids_may_be_a_list_or_any_integers(ids):
    weight, source = torch.zeros(6, 20), normal(6, 20)
    repair_rows_(weight, source, ids, 1.0)
    assert weight.any(1).nonzero().flatten().tolist() == sorted(torch.as_tensor(ids).tolist())


@on_both_paths
@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (4, 4)])
def test_nothing_to_write_is_fine(shape):
    weight = normal(*shape)
    before = weight.clone()
    assert repair_rows_(weight, normal(*shape, seed=1), [], 1.0) is weight
    assert torch.equal(weight, before)


@on_both_paths
def test_a_weight_without_columns_has_its_ids_checked():
    repair_rows_(torch.empty(4, 0), torch.empty(4, 0), [1], 1.0, torch.ones(1))
    with pytest.raises(ValueError, match="row_ids"):
        repair_rows_(torch.empty(4, 0), torch.empty(4, 0), [4], 1.0)


@on_both_paths
def test_a_matrix_may_be_its_own_source():
    weight = normal(5, 30)
    expected = weight.clone()
    repair_rows_(expected, weight.clone(), [1, 4], 2.0)
    repair_rows_(weight, weight, [1, 4], 2.0)
    assert torch.equal(weight, expected)


@on_both_paths
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_written_and_stays_as_it_is(requires_grad):
    weight = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=requires_grad)
    source = torch.nn.Parameter(normal(3, 4))
    repair_rows_(weight, source, [1], 1.0)
    assert weight[1].norm().item() == pytest.approx(1.0)
    assert weight.requires_grad is requires_grad
    assert weight.is_leaf
    assert weight.grad_fn is None


@on_both_paths
def test_equal_inputs_give_equal_bits():
    source, made = normal(9, 70, dtype=torch.bfloat16), []
    for ids in ([1, 3, 8], [8, 1, 3]):
        weight = torch.zeros(9, 70, dtype=torch.bfloat16)
        made.append(repair_rows_(weight, source, ids, 1.3))
    assert torch.equal(*made)


@on_both_paths
def test_offsets_beyond_32_bits_reach_their_row():
    # Four gigabytes that are reserved and never touched, but for three rows.
    stride = 1 << 30
    weight = torch.empty(2 * stride + 16, dtype=torch.float16).as_strided((3, 16), (stride, 1))
    weight.copy_(normal(3, 16))
    check(weight, normal(3, 16, seed=1), torch.tensor([2]), 1.0)


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_value_that_would_overflow_stops_it_before_anything_is_written(dtype):
    largest = torch.finfo(dtype).max
    weight, source = normal(4, 8, dtype=dtype), normal(4, 8)
    source[3] = torch.tensor([1.0] + 7 * [0.0])
    before = weight.clone()
    # The norm is spread in rows 0 to 2, and is one value in row 3.
    with pytest.raises(ValueError, match=r"overflows .* in the rows \[3\]"):
        repair_rows_(weight, source, [1, 3], largest * 1.001)
    with pytest.raises(ValueError, match=r"overflows .* in the rows \[3\]"):
        repair_rows_(weight, source, [1, 3], 1.0, torch.tensor([1.0, 0.99 / largest], dtype=torch.float64))
    assert torch.equal(weight, before)
    repair_rows_(weight, source, [1, 3], largest * 0.999)
    assert weight.isfinite().all()


@on_both_paths
def test_a_factor_that_two_fp32_numbers_cannot_hold_is_refused():
    weight, source = torch.zeros(1, 3), torch.tensor([[1e-45, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"overflows float32 in the rows \[0\]"):
        repair_rows_(weight, source, [0], 1e38)
    assert not weight.any()


BAD_ROWS = {0: 0.0, 1: NAN, 2: INF, 3: -INF}


@on_both_paths
def test_rows_without_a_direction_are_named_and_nothing_is_written():
    weight, source = normal(8, 5), normal(8, 5, seed=1)
    for row, value in BAD_ROWS.items():
        source[row] = value
    before = weight.clone()
    with pytest.raises(ValueError, match=r"source holds zero, NaN or Inf for the rows \[3, 0, 1, 2\]"):
        repair_rows_(weight, source, [3, 7, 0, 1, 2], 1.0)
    with pytest.raises(ValueError, match=r"source, or source_norms, holds .* \[1, 4, 5\]"):
        repair_rows_(weight, source, [1, 4, 5, 6], 1.0, torch.tensor([1.0, 0.0, NAN, 1.0]))
    with pytest.raises(ValueError, match=r"\[6\]"):
        repair_rows_(weight, source, [6], 1.0, torch.tensor([-1.0]))
    assert torch.equal(weight, before)


def arguments(**changed):
    return {"weight": normal(6, 4), "source": normal(6, 4, seed=1), "row_ids": [1, 2], "target_norm": 1.0} | changed


REFUSED = {
    "duplicates": (arguments(row_ids=[3, 1, 3, 0, 1]), r"row_ids must be all different, got more than once: \[1, 3\]"),
    "too large": (arguments(row_ids=[0, 6, 9]), r"row_ids must be from 0 to 5, got \[6, 9\]"),
    "negative": (arguments(row_ids=[-1]), r"row_ids must be from 0 to 5, got \[-1\]"),
    "many": (arguments(row_ids=list(range(6, 50))), r"25, \.\.\. \(44 in all\)\]"),
    "list of floats": (arguments(row_ids=[1.0, 2.5]), "row_ids must be integers"),
    "floats": (arguments(row_ids=torch.tensor([1.0])), "row_ids must be integers"),
    "mask": (arguments(row_ids=torch.ones(6, dtype=torch.bool)), "row_ids must be integers"),
    "nested": (arguments(row_ids=torch.tensor([[1]])), "row_ids must be integers in one dimension"),
    "zero norm": (arguments(target_norm=0.0), "target_norm must be positive and finite, got 0.0"),
    "negative norm": (arguments(target_norm=-1.0), "target_norm must be positive"),
    "NaN norm": (arguments(target_norm=NAN), "target_norm must be positive and finite, got nan"),
    "infinite norm": (arguments(target_norm=INF), "target_norm must be positive and finite, got inf"),
    "number of norms": (arguments(source_norms=torch.ones(3)), r"source_norms must hold one float per row id, \[2\]"),
    "integer norms": (arguments(source_norms=torch.ones(2, dtype=torch.int64)), "source_norms must hold one float"),
    "weight 1-D": (arguments(weight=normal(6)), r"weight must be 2-D, \[rows, cols\], got the shape \(6,\)"),
    "source 3-D": (arguments(source=normal(6, 4, 1)), "source must be 2-D"),
    "shapes": (arguments(source=normal(6, 5)), r"source must have the weight's shape \(6, 4\), got \(6, 5\)"),
    "float64": (arguments(weight=normal(6, 4).double()), "weight must be bfloat16, float16 or float32, got .*float64"),
    "float8": (arguments(source=normal(6, 4).to(torch.float8_e5m2)), "source must be .*, got torch.float8_e5m2"),
    "integers": (arguments(weight=torch.zeros(6, 4, dtype=torch.int8)), "weight must be .*, got torch.int8"),
    "no data": (arguments(source=torch.empty(6, 4, device="meta")), "source must hold data, got a meta tensor"),
    "one memory": (arguments(weight=normal(1, 4).expand(6, 4)), "weight must have its own memory"),
}


@on_both_paths
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_and_nothing_is_written(case):
    given, message = REFUSED[case]
    before = given["weight"].clone()
    with pytest.raises(ValueError, match=message):
        repair_rows_(**given)
    assert torch.equal(given["weight"], before)


SHAPES_AND_STRIDES = [
    (rows, cols, row, col) for rows in range(4) for cols in range(4) for row in range(7) for col in range(7)
]


def test_a_weight_is_refused_exactly_if_two_of_its_elements_have_one_address():
    refused = 0
    for rows, cols, row, col in SHAPES_AND_STRIDES:
        weight = torch.zeros(64).as_strided((rows, cols), (row, col))
        addresses = [i * row + j * col for i in range(rows) for j in range(cols)]
        if len(set(addresses)) == len(addresses):
            repair_rows_(weight, torch.ones(rows, cols), [], 1.0)
            continue
        refused += 1
        with pytest.raises(ValueError, match="weight must have its own memory for every element"):
            repair_rows_(weight, torch.ones(rows, cols), [], 1.0)
    assert refused > 50


@pytest.mark.interpreter
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize("cols", [1040, 1001])
def test_one_launch_moves_the_rows_once(traffic, cols):
    weight, source = torch.zeros(9, cols, dtype=torch.bfloat16), normal(9, cols)
    repair_rows_(weight, source, [1, 8, 4], 1.0)
    (launch,) = traffic
    assert launch.stores.requested_bytes == launch.stored("weight_ptr") == 3 * cols * 2
    assert launch.loaded("source_ptr") == 3 * cols * 4
    assert launch.loaded("weight_ptr") == 0


@pytest.mark.interpreter
def test_a_program_beyond_the_columns_writes_nothing():
    weight = Guarded(normal(2, 10))
    before = weight.tensor.clone()
    ids, factors = torch.tensor([1]), torch.ones(1, 2)
    row_repair.repair_rows_kernel.fn[(1, 3)](
        weight.tensor, normal(2, 10), ids, factors, 10, 10, 1, 10, 1, ALIGNED=False, BLOCK_N=8
    )
    weight.check()
    assert torch.equal(weight.tensor[0], before[0])
    assert torch.equal(weight.tensor[1], normal(2, 10)[1])


def test_the_torch_path_makes_no_large_temporary():
    weight, source = torch.zeros(2000, 1024, dtype=torch.bfloat16), torch.ones(2000, 1024, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        repair_rows_(weight, source, list(range(2000)), 1.0)
    assert weight[-1, -1].item() == 1 / 32
    assert largest.nbytes <= 2 << 20


def test_shapes_and_strides_share_one_binary_per_data_types_and_alignment(triton_cache):
    with target_driver("sm_90") as driver:
        for rows, cols in [(4, 16), (100, 1024), (1, 4096)]:
            repair_rows_(torch.zeros(rows, cols), torch.ones(rows, cols), [0], 1.0)
        assert len(driver.compiled) == 1
        for rows, cols in [(4, 1), (3, 1001)]:
            repair_rows_(torch.zeros(rows, cols), torch.ones(rows, cols), list(range(rows)), 1.0)
        repair_rows_(torch.zeros(16, 16).t(), torch.ones(16, 16), [0, 1], 1.0)
        assert len(driver.compiled) == 2
        assert [launch.grid for launch in driver.launches] == [
            (1, 1, 1),
            (1, 1, 1),
            (1, 4, 1),
            (4, 1, 1),
            (3, 1, 1),
            (2, 1, 1),
        ]


def test_aligned_rows_are_moved_16_bytes_at_a_time(triton_cache):
    config = spaces.ROW_REPAIR.get(TARGETS["sm_90"], dtype=torch.bfloat16, flags={"ALIGNED": True}).configs[0]
    dtypes = (torch.bfloat16, torch.bfloat16, torch.int64, torch.float32)
    tensors = [torch.empty(4, dtype=dtype, device="meta") for dtype in dtypes]
    with target_driver("sm_90"):
        binary = row_repair.repair_rows_kernel.fn.run(
            *tensors, 64, 64, 1, 64, 1, ALIGNED=True, grid=(1,), warmup=True, **config.options
        )
    wide = [line for line in binary.asm["ptx"].splitlines() if "global.v4.b32" in line]
    assert [("ld" in line, "st" in line) for line in wide] == [(True, False), (False, True)]
