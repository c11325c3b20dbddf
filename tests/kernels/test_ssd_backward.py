"""SSD's backward kernels under the interpreter against the recurrence in float64, and as they are compiled."""

import itertools
import math
import re
import subprocess

import pytest
import torch
import triton

from automodel_kernels.hardware import TARGETS
from automodel_kernels.ssd import chunk_backward
from automodel_kernels.ssd.backward import ssd_backward_triton
from automodel_kernels.ssd.chunk_backward import chunk_backward_kernel, count_head_blocks, tile_tokens
from automodel_kernels.ssd.forward import ssd_forward_triton
from automodel_kernels.ssd.reference import mamba_chunk_scan_combined_reference
from automodel_kernels.ssd.state_gradients import chunk_gradients_kernel
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.accuracy import relative_rms

OPTIONS = ("D", "z", "dt_bias", "initial_states")
ABSENT = dict.fromkeys((*OPTIONS, "seq_idx", "cu_seqlens")) | {"dt_softplus": False, "dt_limit": (0.0, math.inf)}
TOLERANCES = {torch.float32: 1.5e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# dA adds the gradients of all tokens, which cancel.
TOLERANCES_OF_A = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
NAN = math.nan

interpreted = [pytest.mark.interpreter, pytest.mark.usefixtures("narrow_floats", "poison")]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(*, batch=1, seqlen=70, heads=2, groups=1, dim=16, state=16, dtype=torch.float32, seqs=None, seed=0, only=()):
    """The five tensors that are always there, and those options that `only` names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    made = {
        "x": normal(batch, seqlen, heads, dim).to(dtype),
        "dt": normal(batch, seqlen, heads) - 1.0,
        "A": -torch.exp(normal(heads) - 1.0),
        "B": normal(batch, seqlen, groups, state).to(dtype),
        "C": (normal(batch, seqlen, groups, state) + 0.5).to(dtype),
    }
    options = {
        "D": normal(heads),
        "z": normal(batch, seqlen, heads, dim).to(dtype),
        "dt_bias": normal(heads) / 4,
        "initial_states": normal(batch if seqs is None else seqs, heads, dim, state),
    }
    return made | ABSENT | {"dt_softplus": True} | {name: options[name] for name in only}


def borders(*places, seqlen, ids=(7, 3, 7, -1)):
    """seq_idx of one row with another document from each place on; ids come back."""
    seq_idx = torch.empty(1, seqlen, dtype=torch.int32)
    for number, (begin, end) in enumerate(itertools.pairwise((0, *places, seqlen))):
        seq_idx[:, begin:end] = ids[number % len(ids)]
    return seq_idx


def cotangents(given, *, final):
    """The gradients of out and of the final states; the latter None where nobody uses those."""
    generator = torch.Generator().manual_seed(1)
    x, cu_seqlens = given["x"], given["cu_seqlens"]
    dout = torch.randn(x.shape, generator=generator).to(x.dtype)
    seqs = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (seqs, x.shape[2], x.shape[3], given["B"].shape[3])
    return dout, torch.randn(shape, generator=generator) if final else None


def reference(given, dout, dfinal):
    """The gradient of every floating input, in float64."""
    wide = {
        name: each.detach().double().requires_grad_()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
        else each
        for name, each in given.items()
    }
    varlen = given["cu_seqlens"] is not None
    results = mamba_chunk_scan_combined_reference(
        **wide, chunk_size=64, return_final_states=not varlen, return_varlen_states=varlen
    )
    loss = (results[0] * dout.double()).sum()
    if dfinal is not None:
        loss = loss + (results[1] * dfinal.double()).sum()
    leaves = {name: each for name, each in wide.items() if isinstance(each, torch.Tensor) and each.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def run(given, dout, dfinal):
    made = ssd_forward_triton(**given, save=True)
    saved = (made.dts, made.decay, made.runs, made.chunk_states, made.out_ungated)
    return ssd_backward_triton(dout, dfinal, saved, **given)


def errors(given, *, final=True):
    """Runs the kernels; the relative RMS error of each gradient over its tolerance."""
    dout, dfinal = cotangents(given, final=final)
    got = run(given, dout, dfinal)
    dtype = given["x"].dtype
    expected = reference(given, dout, dfinal)
    for name in OPTIONS:
        assert (getattr(got, name) is None) == (given[name] is None)
    for name in ("x", "dt", "B", "C"):
        assert getattr(got, name).dtype == given[name].dtype
    sizes = sizes_of_sums(given, dout, expected)
    found = {}
    for name, each in expected.items():
        tolerance = TOLERANCES_OF_A[dtype] if name == "A" else TOLERANCES[dtype]
        found[name] = relative_rms(getattr(got, name), each) / tolerance
        if name in sizes:
            # Of a sum that happens to vanish no digit is left.
            found[name] *= float(each.norm() / torch.maximum(each.norm(), sizes[name].norm()))
    return found


def sizes_of_sums(given, dout, expected):
    """How large the gradients that add over tokens are if what they add has random signs; that of A is an estimate."""
    dy = dout.double() if given["z"] is None else dout.double() * torch.nn.functional.silu(given["z"].double())
    of_d = (dy * given["x"].double()).square().sum((0, 1))
    if given["D"] is not None and given["D"].ndim == 1:
        of_d = of_d.sum(1)
    steps = given["dt"].double() if given["dt_bias"] is None else given["dt"].double() + given["dt_bias"].double()
    slope = 1.0
    if given["dt_softplus"]:
        slope, steps = steps.sigmoid(), torch.nn.functional.softplus(steps)
    of_a = (steps.clamp(*given["dt_limit"]) * expected["dt"] / slope / given["A"].double()).square().sum((0, 1))
    return {"dt_bias": expected["dt"].square().sum((0, 1)).sqrt(), "D": of_d.sqrt(), "A": of_a.sqrt()}


def worse_than(most, found):
    return {name: each for name, each in found.items() if not each <= most}


def check(given, *, final=True):
    """Every gradient must be that of the recurrence."""
    assert worse_than(1.0, errors(given, final=final)) == {}


class TestValues:
    pytestmark = interpreted

    def test_all_options_together(self):
        check(inputs(batch=2, seqlen=66, heads=2, groups=2, only=OPTIONS))

    def test_no_option(self):
        check(inputs(seqlen=40) | {"dt_softplus": False, "dt": torch.rand(1, 40, 2)}, final=False)

    @pytest.mark.parametrize("seqlen", [1, 64, 257])
    def test_ragged_lengths(self, seqlen):
        check(inputs(seqlen=seqlen, heads=1, only=("initial_states",)))

    @pytest.mark.parametrize("name", OPTIONS)
    def test_each_option_alone(self, name):
        check(inputs(seqlen=20, heads=1, only=(name,)))

    def test_blocks_of_heads_of_different_sizes(self, monkeypatch):
        monkeypatch.setattr(chunk_backward, "WANTED_PROGRAMS", 1)
        check(inputs(seqlen=20, heads=6, groups=2, only=("D",)))

    @pytest.mark.parametrize(("dim", "state"), [(32, 1), (64, 128), (128, 20), (16, 256)])
    def test_sizes_of_heads_and_states(self, dim, state):
        check(inputs(seqlen=40, heads=1, dim=dim, state=state, only=("initial_states",)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_16_bits(self, dtype):
        given = inputs(seqlen=130, dim=32, state=24, dtype=dtype, only=OPTIONS)
        check(given | {"dt": given["dt"].to(dtype)})

    def test_a_skip_per_channel(self):
        D = torch.randn(16, 2, generator=torch.Generator().manual_seed(2)).t()
        check(inputs(seqlen=20, only=("z",)) | {"D": D})

    @pytest.mark.parametrize("softplus", [True, False])
    def test_limits_of_the_step(self, softplus):
        given = inputs(seqlen=30, heads=1, only=("dt_bias",)) | {"dt_softplus": softplus, "dt_limit": (0.2, 0.6)}
        check(given)

    def test_a_step_at_a_limit_has_a_gradient(self):
        given = inputs(seqlen=20, heads=1) | {"dt_softplus": False, "dt_limit": (0.5, 1.0)}
        given["dt"][0, :5] = 0.5
        given["dt"][0, 5:10] = 1.0
        check(given)

    @pytest.mark.parametrize("decay", [-5.0, -60.0, -1e30])
    def test_strong_decay_leaves_no_nan(self, decay):
        given = inputs(seqlen=80, heads=1, only=("initial_states",))
        given |= {"dt": torch.ones(1, 80, 1), "dt_softplus": False, "A": torch.tensor([decay])}
        given["dt"][:, 70:] = 1e-3
        found = errors(given)
        # What is left of the gradients of A and dt is below what fp32 holds.
        del found["A"], found["dt"]
        # A sum of 64 such steps has that many digits less after the point.
        assert worse_than(10.0, found) == {}
        dout, dfinal = cotangents(given, final=True)
        got = run(given, dout, dfinal)
        assert got.A.isfinite().all()
        assert got.dt.isfinite().all()

    def test_other_dtypes_than_the_activations(self):
        given = inputs(seqlen=40, dtype=torch.float16, only=OPTIONS)
        for name in ("D", "dt_bias", "initial_states"):
            given[name] = given[name].to(torch.bfloat16)
        check(given)

    def test_two_runs_have_the_same_bits(self):
        given = inputs(seqlen=66, only=OPTIONS)
        first, second = (run(given, *cotangents(given, final=True)) for _ in range(2))
        for name in ("x", "dt", "A", "B", "C", *OPTIONS):
            assert torch.equal(getattr(first, name), getattr(second, name))


class TestDocumentsByNumber:
    pytestmark = interpreted

    @pytest.mark.parametrize("places", [(1, 63, 64, 65), (32,), (256,), (100, 255, 257)], ids=str)
    def test_borders_anywhere(self, places):
        seqlen = 260 if max(places) > 100 else 80
        given = inputs(seqlen=seqlen, heads=1, only=("initial_states", "D"))
        check(given | {"seq_idx": borders(*places, seqlen=seqlen)})

    def test_rows_have_their_own(self):
        seq_idx = torch.cat([borders(10, 66, seqlen=70), borders(64, 65, seqlen=70)])
        check(inputs(batch=2, heads=1, only=("z",)) | {"seq_idx": seq_idx})


class TestDocumentsByLength:
    pytestmark = interpreted

    def test_each_is_as_if_alone(self):
        lengths = (0, 3, 66, 0)
        bounds = [0, *itertools.accumulate(lengths)]
        given = inputs(seqlen=69, heads=1, seqs=len(lengths), only=OPTIONS)
        given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        check(given)
        dout, dfinal = cotangents(given, final=True)
        together = run(given, dout, dfinal)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin == end:
                assert torch.equal(together.initial_states[number], dfinal[number])
                continue
            alone = {name: each[:, begin:end] if name in "x dt B C z" else each for name, each in given.items()}
            alone |= {"initial_states": given["initial_states"][number : number + 1], "cu_seqlens": None}
            expected = run(alone, dout[:, begin:end], dfinal[number : number + 1])
            for name in ("x", "dt", "B", "C", "z"):
                assert torch.equal(getattr(together, name)[:, begin:end], getattr(expected, name))
            assert torch.equal(together.initial_states[number], expected.initial_states[0])

    def test_together_with_numbers(self):
        given = inputs(seqlen=90, heads=1, only=("initial_states",), seqs=4) | {
            "seq_idx": borders(5, 70, 71, seqlen=90)
        }
        given["cu_seqlens"] = torch.tensor([0, 5, 5, 80, 90], dtype=torch.int32)
        check(given)

    def test_no_token_at_all(self):
        given = inputs(seqlen=0, seqs=2, only=OPTIONS) | {"cu_seqlens": torch.zeros(3, dtype=torch.int32)}
        dout, dfinal = cotangents(given, final=True)
        got = run(given, dout, dfinal)
        assert torch.equal(got.initial_states, dfinal)
        for name in ("A", "D", "dt_bias"):
            assert torch.equal(getattr(got, name), torch.zeros(2))


def inside(values):
    """The tensor in a larger one full of NaN, at an address and with strides that fit nothing."""
    base = torch.full([size + 3 for size in values.shape], NAN, dtype=values.dtype)
    view = base[tuple(slice(1, 1 + size) for size in values.shape)]
    view.copy_(values)
    return view


def stepped(values):
    """Every second element of rows that otherwise hold NaN."""
    base = torch.full((*values.shape, 2), NAN, dtype=values.dtype)
    base[..., 1] = values
    return base[..., 1]


LAYOUTS = {
    "inside": inside,
    "stepped": stepped,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}


class TestLayouts:
    pytestmark = interpreted

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_strides_are_read_and_nothing_outside(self, layout):
        given = inputs(batch=2, seqlen=20, heads=2, groups=2, only=OPTIONS)
        given["D"] = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
        dout, dfinal = cotangents(given, final=True)
        expected = run(given, dout, dfinal)
        strided = {
            name: LAYOUTS[layout](each) if isinstance(each, torch.Tensor) else each for name, each in given.items()
        }
        got = run(strided, LAYOUTS[layout](dout), LAYOUTS[layout](dfinal))
        for name in ("x", "dt", "A", "B", "C", *OPTIONS):
            assert torch.equal(getattr(got, name), getattr(expected, name))

    def test_a_gradient_without_strides(self):
        given = inputs(seqlen=20)
        dout = torch.full((1, 1, 1, 1), 0.5)
        got = run(given, dout.expand(given["x"].shape), None)
        assert relative_rms(got.x, reference(given, dout, None)["x"]) <= 1.5e-6

    def test_unaligned_16_bits(self):
        given = inputs(seqlen=70, dim=32, state=24, dtype=torch.float16, only=("z",))
        views = {name: inside(given[name]) for name in ("x", "B", "C", "z")}
        check(given | views)

    @pytest.mark.parametrize("dimension", [1, 2])
    def test_offsets_beyond_32_bits_reach_their_element(self, dimension):
        # Gigabytes that are reserved and never touched, but for a few elements.
        torch.utils.deterministic.fill_uninitialized_memory = False
        far = 1 << 30
        base = torch.empty(2 * far + (1 << 16), dtype=torch.float16)
        given = inputs(seqlen=3, heads=3, groups=3, dtype=torch.float16, only=("z",))
        given["dt"] = given["dt"].half()
        dout, _ = cotangents(given, final=False)
        expected = reference(given, dout, None)
        strides = [1 << 15, 1 << 8, 1 << 8, 1]
        strides[dimension] = far

        def spread(values, number):
            return base.as_strided(values.shape, strides[: values.ndim], number * (1 << 11)).copy_(values)

        views = {name: spread(given[name], number) for number, name in enumerate(("x", "B", "C", "z", "dt"))}
        got = run(given | views, spread(dout, 5), None)
        for name in ("x", "B", "C", "z", "dt"):
            assert relative_rms(getattr(got, name), expected[name]) <= 1e-3


class TestTraffic:
    pytestmark = interpreted

    def test_each_launch_moves_each_byte_once(self, traffic, monkeypatch):
        monkeypatch.setattr(chunk_backward, "WANTED_PROGRAMS", 1)
        seqlen, heads, dim, state = 256, 2, 32, 64
        given = inputs(seqlen=seqlen, heads=heads, dim=dim, state=state, dtype=torch.bfloat16)
        given["dt"] = given["dt"].bfloat16()
        made = ssd_forward_triton(**given, save=True)
        saved = (made.dts, made.decay, made.runs, made.chunk_states, made.out_ungated)
        traffic.clear()
        ssd_backward_triton(cotangents(given, final=False)[0], None, saved, **given)
        assert len(traffic) == 5
        moved = sum(each.loads.distinct_bytes + each.stores.distinct_bytes for each in traffic)
        # Neither parameters nor one number a chunk and head are counted.
        assert 0 <= moved - seqlen * bytes_of_a_token(heads=heads, dim=dim, state=state) <= 10 * 4 * heads * 2

    def test_at_full_size_that_is_at_most_two_and_a_half_times_the_floor(self):
        sizes = {"heads": 80, "dim": 64, "state": 128}
        # x, dout, dt, B, C, and the gradients of all but dout.
        floor = 2 * (3 * 80 * 64 + 2 * 80 + 4 * 128)
        assert bytes_of_a_token(**sizes) <= 2.5 * floor


def bytes_of_a_token(*, heads, dim, state, blocks=2):
    """What the five launches load and store, in 16 bits and without options."""
    head, states, steps, matrix = 2 * heads * dim, 2 * heads * dim * state / 256, 4 * heads, 2 * state
    # A pair of different tiles of 64 tokens, or a tile with itself: ten of sixteen.
    sums = 2 * 4 * heads * 10 / 4
    partials = blocks * 2 * 4 * state
    return sum(
        (
            head + matrix + steps + states,
            2 * states,
            2 * head + 2 * matrix + 2 * steps + 2 * states + head + 3 * steps + sums + partials,
            4 * steps + sums + 2 * 2 * heads,
            partials + 2 * matrix,
        )
    )


def launch_all(*, batch, seqlen, dtype=torch.bfloat16):
    """The backward's launches at full size on meta tensors, strided as slices of a projection are."""
    heads, dim, state = 80, 64, 128
    rows = torch.empty(batch, seqlen, heads * dim + 2 * state, dtype=dtype, device="meta")
    x, B, C = rows.split([heads * dim, state, state], -1)
    given = ABSENT | {
        "x": x.unflatten(-1, (heads, dim)),
        "dt": torch.empty(batch, seqlen, heads, dtype=dtype, device="meta"),
        "A": torch.empty(heads, device="meta"),
        "B": B.unflatten(-1, (1, state)),
        "C": C.unflatten(-1, (1, state)),
        "D": torch.empty(heads, device="meta"),
    }
    made = ssd_forward_triton(**given, save=True)
    saved = (made.dts, made.decay, made.runs, made.chunk_states, made.out_ungated)
    ssd_backward_triton(torch.empty(x.shape, dtype=dtype, device="meta").view_as(given["x"]), None, saved, **given)


class TestCompiled:
    def test_binaries_are_few_and_load_16_bytes_at_a_time(self, triton_cache):
        with target_driver("sm_90") as driver:
            launch_all(batch=1, seqlen=2048)
            # Three are the forward's.
            assert len(driver.binaries) == 3 + 5
            for batch, seqlen in ((2, 300), (1, 1), (3, 8192)):
                launch_all(batch=batch, seqlen=seqlen)
            assert len(driver.binaries) == 3 + 5
        for name in ("chunk_backward_kernel", "chunk_gradients_kernel"):
            (cubin,) = triton_cache.rglob(f"{name}.cubin")
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert not re.findall(r"LDG[.\w]*\.(?:U16|S16|U8)|STG[.\w]*\.(?:U16|U8)", text)
            assert len(re.findall(r"LDG(?:STS)?[.\w]*\.128", text)) >= 4
            assert not re.findall(r"\b(?:LDL|STL)\b", text)


class TestChoices:
    def test_heads_are_cut_until_a_gpu_is_full(self):
        sizes = [(128, 1, 80), (8, 1, 80), (1, 1, 80), (4, 8, 1), (1, 2, 3)]
        assert [count_head_blocks(num_tiles=t, num_groups=g, heads_per_group=h) for t, g, h in sizes] == [
            2,
            32,
            80,
            1,
            3,
        ]

    @pytest.mark.parametrize(
        ("dtype", "dim", "state", "aligned", "tile"),
        [
            (torch.bfloat16, 64, 128, True, 64),
            (torch.float16, 32, 16, True, 64),
            (torch.bfloat16, 64, 128, False, 32),
            (torch.bfloat16, 128, 128, True, 32),
            (torch.bfloat16, 64, 129, True, 32),
            (torch.float32, 64, 128, True, 32),
        ],
    )
    def test_tiles_shrink_where_registers_are_scarce(self, dtype, dim, state, aligned, tile):
        assert tile_tokens(dtype, head_dim=dim, state_dim=state, aligned=aligned) == tile

    @pytest.mark.parametrize("target", TARGETS)
    def test_16_bits_at_usual_sizes_accept_no_stack(self, target):
        for aligned, packed, per_channel in itertools.product([True, False], repeat=3):
            flags = {"HEAD_DIM": 64, "WIDE_STATE": 128, "ALIGNED": aligned, "PACKED": packed}
            flags |= {"D_PER_CHANNEL": per_channel, "TILE": 64 if aligned else 32}
            for kernel in (chunk_backward_kernel, chunk_gradients_kernel):
                found = kernel.space.find(TARGETS[target], dtype=torch.bfloat16, flags=flags)
                assert found.accepted_stack == 0
