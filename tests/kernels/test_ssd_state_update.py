"""One token of SSD against float64, in torch and under the interpreter: values, what is written, what is refused."""

import numpy
import pytest
import torch

from automodel_kernels.hardware import TARGETS, interpreter_enabled
from automodel_kernels.ssd.chunked import ssd_forward_torch
from automodel_kernels.ssd.state_update import selective_state_update, selective_state_update_reference
from automodel_kernels.ssd.state_update_examples import SSD_STATE_UPDATE
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.accuracy import relative_rms
from automodel_kernels.tuning.recording import record_launches
from kernel_memory import Guarded

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def path(request):
    """The test twice: in torch, and with the kernel under the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("narrow_floats")
        request.getfixturevalue("poison")
    return request.param


on_both_paths = pytest.mark.usefixtures("path")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(*, batch=2, heads=4, head_dim=20, groups=2, state=24, dtype=torch.float32, state_dtype=None, tied=True):
    """With dt, A, D and dt_bias expanded from one number a head, as layers pass them."""
    width, depth = (1, 1) if tied else (head_dim, state)
    return {
        "state": normal(batch, heads, head_dim, state, dtype=state_dtype or dtype),
        "x": normal(batch, heads, head_dim, seed=1, dtype=dtype),
        "dt": normal(batch, heads, width, seed=2, dtype=dtype).expand(-1, -1, head_dim),
        "A": (-normal(heads, width, depth, seed=3).exp()).expand(-1, head_dim, state),
        "B": normal(batch, groups, state, seed=4, dtype=dtype),
        "C": normal(batch, groups, state, seed=5, dtype=dtype),
        "D": normal(heads, width, seed=6).expand(-1, head_dim),
        "z": normal(batch, heads, head_dim, seed=7, dtype=dtype),
        "dt_bias": normal(heads, width, seed=8).expand(-1, head_dim),
        "dt_softplus": True,
    }


def widened(given):
    floating = {name for name, each in given.items() if isinstance(each, torch.Tensor) and each.is_floating_point()}
    return {name: each.to(torch.float64, copy=True) if name in floating else each for name, each in given.items()}


def check(given, *, tolerance=1e-6):
    wide = widened(given)
    expected = selective_state_update_reference(**wide)
    out = selective_state_update(**given)
    assert (out.shape, out.dtype) == (given["x"].shape, given["x"].dtype)
    assert relative_rms(out, expected) <= tolerance
    assert relative_rms(given["state"], wide["state"]) <= max(tolerance, TOLERANCES[given["state"].dtype])


def test_the_reference_is_the_formula():
    given = widened(inputs(batch=1, heads=1, head_dim=1, groups=1, state=2))
    s, (b, c) = given["state"].flatten().clone(), (given[name].flatten() for name in "BC")
    x, dt, a, d, z, bias = (given[name].flatten()[0] for name in ("x", "dt", "A", "D", "z", "dt_bias"))
    dt = torch.log1p(torch.exp(dt + bias))
    new = torch.exp(dt * a) * s + dt * x * b
    y = ((new * c).sum() + d * x) * z / (1 + torch.exp(-z))
    torch.testing.assert_close(selective_state_update_reference(**given).flatten()[0], y)
    torch.testing.assert_close(given["state"].flatten(), new)


@on_both_paths
@pytest.mark.parametrize("state_dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_data_type_beside_every_state(dtype, state_dtype):
    check(inputs(dtype=dtype, state_dtype=state_dtype), tolerance=TOLERANCES[dtype])


@on_both_paths
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("batch", "heads", "head_dim", "groups", "state"),
    [(1, 1, 1, 1, 1), (2, 2, 33, 1, 128), (1, 3, 33, 3, 17), (2, 2, 16, 2, 256), (5, 6, 8, 2, 16)],
)
def test_sizes(batch, heads, head_dim, groups, state, tied):
    check(inputs(batch=batch, heads=heads, head_dim=head_dim, groups=groups, state=state, tied=tied))


@on_both_paths
@pytest.mark.parametrize("absent", [("D",), ("z",), ("dt_bias",), ("D", "z", "dt_bias")])
@pytest.mark.parametrize("softplus", [True, False])
def test_what_may_be_absent(absent, softplus):
    check(inputs() | dict.fromkeys(absent) | {"dt_softplus": softplus})


@on_both_paths
def test_without_heads():
    given = inputs(heads=1, groups=1, tied=False)
    places = {"A": 0, "D": 0, "dt_bias": 0, "dt_softplus": None}
    flat = {name: each if name == "dt_softplus" else each.squeeze(places.get(name, 1)) for name, each in given.items()}
    flat["state"] = flat["state"].clone()
    out, expected = selective_state_update(**flat), selective_state_update(**given)
    assert out.shape == (2, 20)
    assert torch.equal(out, expected[:, 0])
    assert torch.equal(flat["state"], given["state"][:, 0])


@on_both_paths
@pytest.mark.parametrize(("row_gap", "column_step"), [(0, 1), (3, 1), (8, 1), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_but_the_state_is_written(dtype, row_gap, column_step):
    given = inputs(dtype=dtype)
    guarded = {
        name: Guarded(each, row_gap=row_gap, column_step=column_step)
        for name, each in given.items()
        if name in {"state", "x", "B", "C", "z"}
    }
    before = {name: each.tensor.clone() for name, each in guarded.items()}
    check(given | {name: each.tensor for name, each in guarded.items()}, tolerance=TOLERANCES[dtype])
    for name, each in guarded.items():
        each.check()
        assert torch.equal(each.tensor, before[name]) is (name != "state")


@on_both_paths
def test_a_transposed_state_and_its_inputs():
    given = inputs(tied=False)
    given |= {name: given[name].mT.contiguous().mT for name in ("state", "A", "B", "C", "x", "z", "dt")}
    check(given)


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_choose_the_states_and_leave_the_others(dtype):
    given = inputs(batch=3)
    given["state"] = normal(6, 4, 20, 24)
    before = given["state"].clone()
    check(given | {"state_batch_indices": torch.tensor([4, 0, 3], dtype=dtype)})
    changed = [not torch.equal(now, then) for now, then in zip(given["state"], before, strict=True)]
    assert changed == [True, False, False, True, True, False]


@on_both_paths
def test_no_rows():
    assert selective_state_update(**inputs(batch=0)).shape == (0, 4, 20)


@on_both_paths
def test_small_steps_keep_their_digits():
    # softplus(-12) is 6e-6: as log(1 + exp(-12)) it would have four digits.
    given = inputs() | {"dt_bias": torch.full((4, 1), -12.0).expand(-1, 20), "D": None, "z": None}
    given["state"].zero_()
    check(given)


@on_both_paths
@pytest.mark.parametrize("tokens", [1, 150])
def test_a_sequence_token_by_token_is_the_whole_sequence(tokens):
    heads, head_dim, groups, state = 2, 16, 1, 16
    tokens = min(tokens, 34) if interpreter_enabled() else tokens
    x, z = (normal(1, tokens, heads, head_dim, seed=seed) for seed in (1, 2))
    dt, a, d, bias = (
        normal(1, tokens, heads, seed=3),
        -normal(heads, seed=4).exp(),
        normal(heads),
        normal(heads, seed=5),
    )
    b, c = (normal(1, tokens, groups, state, seed=seed) for seed in (6, 7))
    initial = normal(1, heads, head_dim, state, seed=8)
    whole, final = ssd_forward_torch(
        x,
        dt,
        a,
        b,
        c,
        D=d,
        z=z,
        dt_bias=bias,
        initial_states=initial,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=True,
        dt_limit=(0.0, float("inf")),
    )
    held = initial.clone()
    made = [
        selective_state_update(
            held,
            x[:, t],
            dt[:, t, :, None].expand(-1, -1, head_dim),
            a[:, None, None].expand(-1, head_dim, state),
            b[:, t],
            c[:, t],
            d[:, None].expand(-1, head_dim),
            z=z[:, t],
            dt_bias=bias[:, None].expand(-1, head_dim),
            dt_softplus=True,
        )
        for t in range(tokens)
    ]
    assert relative_rms(torch.stack(made, dim=1), whole) <= 1e-5
    assert relative_rms(held, final) <= 1e-5


@on_both_paths
def test_nothing_is_recorded_for_a_gradient():
    given = inputs()
    given["x"].requires_grad_()
    out = selective_state_update(**given)
    assert not out.requires_grad
    assert not given["state"].requires_grad


REFUSED = {
    "x 4-D": ({"x": normal(2, 1, 4, 20)}, r"x, B and state must be .* got the shapes \(2, 1, 4, 20\)"),
    "state 2-D": ({"state": normal(2, 24)}, "x, B and state must be"),
    "groups": ({"B": normal(2, 3, 24)}, "B must have a number of groups that divides the 4 heads of x, got 3"),
    "heads": ({"state": normal(2, 3, 20, 24)}, r"state must have the shape \(2, 4, 20, 24\), got \(2, 3, 20, 24\)"),
    "rows": ({"state": normal(3, 4, 20, 24)}, "state must have the 2 rows of x, or state_batch_indices, got 3 rows"),
    "dt": ({"dt": normal(2, 4)}, r"dt must have the shape \(2, 4, 20\), got \(2, 1, 4\)"),
    "A": ({"A": normal(4, 20, 23)}, r"A must have the shape \(4, 20, 24\)"),
    "C": ({"C": normal(2, 1, 24)}, r"C must have the shape \(2, 2, 24\)"),
    "D": ({"D": normal(4)}, r"D must have the shape \(4, 20\), got \(1, 4\)"),
    "z": ({"z": normal(2, 4, 21)}, r"z must have the shape \(2, 4, 20\)"),
    "dt_bias": ({"dt_bias": normal(3, 20)}, r"dt_bias must have the shape \(4, 20\), got \(3, 20\)"),
    "integers": ({"x": torch.ones(2, 4, 20, dtype=torch.int64)}, "x must be .*, got torch.int64"),
    "device": ({"B": torch.empty(2, 2, 24, device="meta")}, "B must be on x's device cpu, got meta"),
    "shared": ({"state": normal(1, 4, 20, 24).expand(2, -1, -1, -1)}, "state must have its own memory for every"),
    "floats": ({"state_batch_indices": torch.ones(2)}, "state_batch_indices must be 2 of int32 or int64, got .*float"),
    "too few": ({"state_batch_indices": torch.tensor([0])}, r"must be 2 of int32 or int64, got .* shape \(1,\)"),
    "outside": ({"state_batch_indices": torch.tensor([0, 2])}, r"must be different ones from 0 to 1, got \[0, 2\]"),
    "negative": ({"state_batch_indices": torch.tensor([-1, 0])}, r"different ones from 0 to 1, got \[-1, 0\]"),
    "twice": ({"state_batch_indices": torch.tensor([1, 1])}, r"different ones from 0 to 1, got \[1, 1\]"),
    "indices' device": ({"state_batch_indices": torch.zeros(2, dtype=torch.int32, device="meta")}, "on x's device cpu"),
}


@on_both_paths
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_and_nothing_is_written(case):
    wrong, message = REFUSED[case]
    given = inputs() | wrong
    before = given["state"].clone()
    with pytest.raises(ValueError, match=message):
        selective_state_update(**given)
    assert torch.equal(given["state"], before)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": normal(2, 4, 20, dtype=torch.float64)}, "x must be torch.bfloat16, .*, got torch.float64"),
        (inputs(state=257), "B must have a state_dim of 1 to 256 on a GPU, got 257"),
    ],
    ids=["float64", "state_dim"],
)
def test_what_the_kernel_cannot_do_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        selective_state_update(**inputs() | wrong)


def test_the_torch_path_takes_float64_and_wide_states():
    given = widened(inputs(state=300))
    expected = widened(given)
    torch.testing.assert_close(selective_state_update(**given), selective_state_update_reference(**expected))
    torch.testing.assert_close(given["state"], expected["state"])


@pytest.mark.interpreter
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize("tied", [True, False])
def test_one_launch_moves_the_state_once(traffic, tied):
    given = inputs(head_dim=64, state=128, dtype=torch.bfloat16, tied=tied)
    selective_state_update(**given)
    (launch,) = traffic
    assert launch.stored("state_ptr") == launch.loaded("state_ptr") == given["state"].nbytes
    assert launch.stored("out_ptr") == given["x"].nbytes
    # Distinct bytes; expanded tensors have one element a head.
    assert launch.loaded("A_ptr") == 4 * 4 * (1 if tied else 64 * 128)
    assert launch.loaded("dt_ptr") == 2 * 2 * 4 * (1 if tied else 64)


@on_both_paths
def test_offsets_beyond_32_bits_reach_their_state():
    # Four gigabytes that are reserved and never touched, but for two states.
    stride = 1 << 30
    given = inputs(batch=1)
    memory = torch.from_numpy(numpy.empty(2 * stride + 4096, dtype=numpy.float16))
    state = memory.as_strided((3, 4, 20, 24), (stride, 480, 24, 1))
    state[2] = given["state"][0].half()
    check(given | {"state": state, "state_batch_indices": torch.tensor([2])})


def test_batch_and_strides_share_one_binary_per_data_type_and_flags(triton_cache):
    with target_driver("sm_90") as driver:
        for batch, heads, head_dim in [(1, 4, 16), (3, 8, 64), (16, 2, 128)]:
            selective_state_update(**inputs(batch=batch, heads=heads, head_dim=head_dim, state=64))
        padded = inputs(state=64)
        padded["state"] = normal(2, 4, 40, 64)[:, :, ::2]
        selective_state_update(**padded)
        assert len(driver.compiled) == 1
        selective_state_update(**inputs(state=64, tied=False))
        assert len(driver.compiled) == 2
        shifted = inputs(state=64)
        shifted["state"] = torch.empty(2 * 4 * 20 * 64 + 1)[1:].view(2, 4, 20, 64)
        selective_state_update(**shifted)
        assert len(driver.compiled) == 3


def test_the_state_is_moved_16_bytes_at_a_time(triton_cache):
    given = inputs(head_dim=64, state=128, dtype=torch.bfloat16)
    flags = {"ALIGNED": True, "BLOCK_N": 128}
    config = spaces.SSD_STATE_UPDATE.get(TARGETS["sm_90"], dtype=torch.bfloat16, flags=flags).configs[0]
    with target_driver("sm_90"):
        ((kernel, arguments),) = record_launches(lambda: selective_state_update(**given))
        binary = kernel.fn.run(**arguments, **config.options, grid=(1,), warmup=True)
    wide = [line for line in binary.asm["ptx"].splitlines() if "global.v4.b32" in line]
    assert {"ld" if "ld." in line else "st" for line in wide} == {"ld", "st"}


def test_opcheck_and_tracing():
    given = inputs()
    arguments = [given[name] for name in ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")]
    torch.library.opcheck(torch.ops.automodel_kernels.ssd_state_update.default, (*arguments, True, None))
    expected = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    compiled = torch.compile(lambda kept: selective_state_update(**kept), fullgraph=True, backend="eager")
    assert torch.equal(compiled(given), selective_state_update(**expected))
    assert torch.equal(given["state"], expected["state"])


def test_the_registered_examples_run():
    labels = [example.label for example in SSD_STATE_UPDATE.examples()]
    assert len(labels) == len(set(labels))
