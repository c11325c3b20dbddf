"""SSD's forward kernels under the interpreter against the recurrence in float64."""

import itertools
import math

import pytest
import torch

from automodel_kernels.ssd.forward import ssd_forward_triton
from automodel_kernels.ssd.state_passing import launch_pass_gradients, launch_pass_states
from automodel_kernels.ssd.tiles import CHUNK, Spans
from automodel_kernels.tuning.accuracy import relative_rms
from ssd_inputs import NAN, TOLERANCES, borders, check, cut, inputs, reference

interpreted = [pytest.mark.interpreter, pytest.mark.usefixtures("narrow_floats", "poison")]


class TestValues:
    pytestmark = interpreted

    @pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 255, 256, 257, 700, 1100])
    def test_ragged_lengths(self, seqlen):
        check(inputs(seqlen=seqlen, heads=1, dim=16, dtype=torch.float32))

    @pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 1, 1), (2, 4, 2), (1, 3, 3)])
    def test_heads_share_the_groups(self, batch, heads, groups):
        check(inputs(batch=batch, heads=heads, groups=groups, seqlen=70))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize(
        ("dim", "state"), [(16, 16), (32, 1), (32, 20), (32, 24), (64, 64), (128, 16), (64, 128), (32, 256), (128, 256)]
    )
    def test_sizes_of_heads_and_states(self, dim, state, dtype):
        check(inputs(seqlen=40, heads=1, dim=dim, state=state, dtype=dtype, only=("initial_states",)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("state", [24, 128])
    def test_every_option_together(self, dtype, state):
        check(
            inputs(seqlen=270, dim=16, heads=1, state=state, dtype=dtype, only=("D", "z", "dt_bias", "initial_states"))
        )

    @pytest.mark.parametrize("name", ["D", "z", "dt_bias", "initial_states"])
    def test_each_option_alone(self, name):
        check(inputs(seqlen=70, dtype=torch.float32, only=(name,)))

    def test_a_skip_per_channel(self):
        given = inputs(seqlen=70, dtype=torch.float32, only=("z",)) | {"D": torch.arange(64.0).reshape(2, 32) / 10}
        check(given)

    @pytest.mark.parametrize(
        "limits",
        [{"dt_softplus": False}, {"dt_limit": (0.05, 0.2)}, {"dt_softplus": False, "dt_limit": (-1.0, math.inf)}],
        ids=str,
    )
    def test_limits_of_the_step(self, limits):
        given = inputs(seqlen=70, only=("dt_bias",)) | limits
        given["dt"] = given["dt"] + 2.0
        got = check(given)
        assert got.dts.min() >= given["dt_limit"][0]

    def test_softplus_is_precise_for_small_and_large_steps(self):
        dt = torch.linspace(-80.0, 80.0, 161)
        given = inputs(seqlen=161, heads=1, dim=16) | {"dt": dt[None, :, None]}
        got = ssd_forward_triton(**given, save=False)
        expected = torch.nn.functional.softplus(dt.double())
        torch.testing.assert_close(got.dts.flatten().double(), expected, rtol=2e-6, atol=0)

    @pytest.mark.parametrize("decay", [-5.0, -30.0, -1e30, -3e38])
    def test_strong_decay(self, decay):
        given = inputs(seqlen=130, heads=1, dim=16, dtype=torch.float32, only=("initial_states",))
        given |= {"dt": given["dt"].abs() + 0.5, "dt_softplus": False, "A": torch.tensor([decay])}
        check(given)

    @pytest.mark.parametrize("decay", [-5.0, -3e38])
    def test_weak_decay_after_strong(self, decay):
        given = inputs(seqlen=130, heads=1, dim=16, dtype=torch.float32)
        given |= {"dt": torch.ones(1, 130, 1), "dt_softplus": False, "A": torch.tensor([decay])}
        given["dt"][:, 80:] = 0.01 / -decay
        out = ssd_forward_triton(**given, save=False).out
        # L of up to 16 tokens of -128 is rounded to 1e-4, and what is left of a token's weight with it.
        assert relative_rms(out, reference(given)[0]) <= 2e-4

    def test_a_nan_step_is_seen(self):
        given = inputs(seqlen=70)
        given["dt"][0, 5, 0] = NAN
        out = ssd_forward_triton(**given, save=False).out
        assert out[0, 5:64, 0].isnan().all()
        assert not out[:, :, 1].isnan().any()

    def test_parameters_may_have_other_dtypes_than_activations(self):
        given = inputs(seqlen=70, dtype=torch.float16, only=("D", "dt_bias", "initial_states"))
        for name in ("D", "dt", "initial_states", "dt_bias"):
            given[name] = given[name].to(torch.bfloat16)
        check(given)

    def test_two_runs_have_the_same_bits(self):
        given = inputs(seqlen=300, heads=2, only=("z", "D"))
        first, second = (ssd_forward_triton(**given, save=True) for _ in range(2))
        for name in ("out", "final_states", "dts", "decay", "chunk_states", "out_ungated"):
            assert torch.equal(getattr(first, name), getattr(second, name))

    def test_saving_changes_no_bit(self):
        given = inputs(seqlen=300, heads=1, only=("z",))
        plain, saved = (ssd_forward_triton(**given, save=save, need_final=save) for save in (False, True))
        assert torch.equal(plain.out, saved.out)
        assert plain.chunk_states is plain.out_ungated is plain.final_states is None


class TestSegments:
    pytestmark = interpreted

    @pytest.mark.parametrize("segment", [256, 512, 1024])
    def test_their_length_changes_rounding_only(self, segment):
        given = inputs(seqlen=1100, heads=1, dim=16, only=("initial_states",))
        check(given, spans=cut(seqlen=1100, segment=segment))

    def test_more_programs_take_longer_segments(self):
        sizes = [(1, 80, 8192), (1, 80, 2048), (4, 128, 1500), (1, 1, 100)]
        spans = [Spans.of(torch.empty(b, t, h, 64, device="meta"), None) for b, h, t in sizes]
        assert [each.segment for each in spans] == [1024, 256, 1024, 256]
        assert [each.num_segments for each in spans] == [8, 8, 8, 1]


class TestDocumentsByNumber:
    pytestmark = interpreted

    @pytest.mark.parametrize(
        "places",
        [(0,), (1,), (63, 64, 65), (32, 128), (255,), (256,), (257, 258), (512,), (1, 2, 3, 299, 300), (100, 511, 513)],
        ids=str,
    )
    def test_borders_anywhere(self, places):
        seqlen = 530 if max(places) > 300 else 310
        given = inputs(seqlen=seqlen, heads=1, only=("initial_states",))
        given["seq_idx"] = borders(*places, seqlen=seqlen)
        check(given, spans=cut(seqlen=seqlen, segment=256))
        if seqlen > 512:
            check(given, spans=cut(seqlen=seqlen, segment=512))

    def test_a_border_hides_all_that_was_before(self):
        given = inputs(seqlen=600, heads=1, only=("initial_states", "D"))
        given["seq_idx"] = borders(300, seqlen=600)
        got = check(given)
        alone = {name: each[:, 300:] if name in "x dt B C seq_idx" else each for name, each in given.items()}
        torch.testing.assert_close(got.out[:, 300:], check(alone | {"initial_states": None}).out, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_rows_have_their_own(self, dtype):
        given = inputs(batch=2, seqlen=150, heads=2, only=("z",))
        seq_idx = torch.cat([borders(10, 100, seqlen=150), borders(64, 65, seqlen=150)]).to(dtype)
        # Strided, with other numbers between.
        given["seq_idx"] = torch.stack([seq_idx, torch.arange(300).reshape(2, 150).to(dtype)], -1)[..., 0]
        check(given)

    def test_runs_count_the_borders_of_a_chunk(self):
        places = (0, 3, 3 + 64, 255, 256, 300, 512)
        given = inputs(seqlen=600, heads=2, dim=16) | {"seq_idx": borders(*places, seqlen=600)}
        runs = ssd_forward_triton(**given, save=True).runs
        expected = [sum(t // CHUNK * CHUNK <= place <= t for place in places if place > 0) for t in range(600)]
        assert runs.dtype == torch.int32
        assert runs[0].tolist() == expected


class TestDocumentsByLength:
    pytestmark = interpreted

    @pytest.mark.parametrize(
        "lengths", [(0, 0, 10, 290, 0, 256, 1, 0), (530,), (64, 64, 257), (0,), (1, 1, 1)], ids=str
    )
    @pytest.mark.parametrize("segment", [256, 512])
    def test_each_is_as_if_alone(self, lengths, segment):
        seqlen, seqs = sum(lengths), len(lengths)
        given = inputs(seqlen=seqlen, heads=1, seqs=seqs, only=("initial_states", "D"))
        bounds = [0, *itertools.accumulate(lengths)]
        given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        got = ssd_forward_triton(**given, save=True, spans=cut(seqlen=seqlen, segment=segment, seqs=seqs, varlen=True))
        chunks = 0
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin == end:
                assert torch.equal(got.final_states[number], given["initial_states"][number])
                continue
            alone = {name: each[:, begin:end] if name in "x dt B C" else each for name, each in given.items()}
            alone |= {"initial_states": given["initial_states"][number : number + 1], "cu_seqlens": None}
            expected = check(alone, spans=cut(seqlen=end - begin, segment=segment))
            assert torch.equal(got.out[:, begin:end], expected.out)
            assert torch.equal(got.final_states[number], expected.final_states[0])
            assert torch.equal(got.decay[:, :, begin:end], expected.decay)
            length = -(-(end - begin) // CHUNK)
            assert torch.equal(got.chunk_states[chunks : chunks + length], expected.chunk_states)
            chunks += length

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_together_with_numbers_and_without_initial_states(self, dtype):
        given = inputs(seqlen=400, heads=1, only=("z",)) | {"seq_idx": borders(50, 290, 291, seqlen=400)}
        given["cu_seqlens"] = torch.tensor([0, 50, 50, 300, 400], dtype=dtype)
        got = check(given)
        assert torch.equal(got.final_states[1], torch.zeros(1, 32, 16))


class TestSaved:
    pytestmark = interpreted

    @pytest.mark.parametrize("segment", [256, 512])
    @pytest.mark.parametrize("initial", [(), ("initial_states",)], ids=["no state", "initial state"])
    def test_states_that_enter_chunks(self, segment, initial):
        given = inputs(batch=2, seqlen=270, heads=1, only=initial)
        got = ssd_forward_triton(**given, save=True, spans=cut(seqlen=270, segment=segment, seqs=2))
        assert got.chunk_states.shape == (4, 1, 32, 16)
        for chunk in range(2):
            before = {name: each[:, : chunk * CHUNK] if name in "x dt B C" else each for name, each in given.items()}
            expected = reference(before)[1]
            for row in range(2):
                assert relative_rms(got.chunk_states[2 * row + chunk], expected[row]) <= 1e-3

    def test_steps_and_decay(self):
        given = inputs(batch=2, seqlen=150, heads=2, only=("dt_bias",))
        got = ssd_forward_triton(**given, save=True)
        dts = torch.nn.functional.softplus(given["dt"].double() + given["dt_bias"]).transpose(1, 2)
        blocks = torch.nn.functional.pad(dts * given["A"].double()[:, None], (0, 42)).unflatten(-1, (3, 64)).cumsum(-1)
        assert relative_rms(got.dts, dts) <= 1e-6
        assert relative_rms(got.decay, blocks.flatten(-2)[..., :150]) <= 1e-6

    def test_the_output_before_the_gate(self):
        given = inputs(seqlen=70, only=("z", "D"))
        got = ssd_forward_triton(**given, save=True)
        assert relative_rms(got.out_ungated, reference(given | {"z": None})[0]) <= 1e-3


class TestPassing:
    pytestmark = interpreted

    @pytest.mark.parametrize("lengths", [(600,), (0, 10, 256, 0, 1100)], ids=str)
    @pytest.mark.parametrize("start", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_gradients_go_backwards_through_chunks(self, lengths, start, dtype):
        counts = [-(-length // CHUNK) for length in lengths]
        seqlen, seqs = sum(lengths), len(lengths)
        spans = cut(seqlen=seqlen, segment=256, seqs=seqs, varlen=True)
        generator = torch.Generator().manual_seed(0)
        local = torch.randn(spans.num_chunks, 2, 32, 24, generator=generator).to(dtype)
        factors = torch.rand(spans.num_chunks, 2, generator=generator)
        dfinal = torch.randn(24, 32, 2, seqs, generator=generator).permute(3, 2, 1, 0) if start else None
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        got = local.clone()
        dinitial = launch_pass_gradients(
            got, factors, dfinal_states=dfinal, cu_seqlens=bounds, spans=spans, need_initial=True
        )
        expected = local.clone()
        first = 0
        for seq, count in enumerate(counts):
            carried = dfinal[seq].clone() if start else torch.zeros(2, 32, 24)
            for chunk in reversed(range(first, first + count)):
                expected[chunk] = carried.to(dtype)
                carried = factors[chunk, :, None, None] * carried + local[chunk].float()
            torch.testing.assert_close(dinitial[seq], carried, rtol=1e-5, atol=1e-5)
            first += count
        torch.testing.assert_close(got, expected, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)

    def test_an_end_that_nobody_wants_is_not_made(self):
        spans = cut(seqlen=300, segment=256)
        local, factors = torch.ones(2, 1, 16, 16), torch.full((2, 1), 0.5)
        made = launch_pass_gradients(
            local, factors, dfinal_states=None, cu_seqlens=None, spans=spans, need_initial=False
        )
        assert made is None
        assert local[1].eq(0).all()
        assert local[0].eq(1).all()

    def test_a_sequence_without_tokens_ends_as_it_begins(self):
        spans = cut(seqlen=0, segment=256, seqs=2)
        initial, final = torch.randn(2, 1, 16, 16), torch.full((2, 1, 16, 16), NAN)
        launch_pass_states(
            torch.empty(0, 1, 16, 16),
            torch.empty(0, 1),
            initial_states=initial,
            final_states=final,
            cu_seqlens=None,
            spans=spans,
            keep_first=False,
        )
        assert torch.equal(final, initial)


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
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_any_strides_are_read_and_nothing_outside(self, dtype, layout):
        options = ("D", "z", "dt_bias", "initial_states")
        given = inputs(batch=2, seqlen=67, heads=2, groups=2, dim=16, dtype=dtype, only=options)
        given["D"] = torch.randn(2, 16)
        expected = ssd_forward_triton(**given, save=True)
        for name in ("x", "dt", "A", "B", "C", *options):
            given[name] = LAYOUTS[layout](given[name])
        got = check(given)
        # Tiles of other shapes add in another order.
        assert relative_rms(got.out, expected.out) <= TOLERANCES[dtype]

    def test_unaligned_documents(self):
        # Their tiles are shorter than a block of the decay.
        given = inputs(seqlen=300, heads=1, dim=16, only=("z", "initial_states"))
        given["seq_idx"] = borders(1, 31, 32, 33, 47, 64, 257, 290, seqlen=300)
        check(given | {"B": inside(given["B"])})

    def test_slices_of_one_projection_stay_aligned(self):
        given = inputs(seqlen=70, heads=2, groups=1, dim=64, state=64, dtype=torch.float16)
        projection = torch.cat([given["x"].flatten(2), given["B"].flatten(2), given["C"].flatten(2)], -1)
        x, B, C = projection.split([128, 64, 64], -1)
        views = {"x": x.unflatten(-1, (2, 64)), "B": B.unflatten(-1, (1, 64)), "C": C.unflatten(-1, (1, 64))}
        assert torch.equal(check(given | views).out, check(given).out)

    @pytest.mark.parametrize("dimension", [1, 2])
    def test_offsets_beyond_32_bits_reach_their_element(self, dimension):
        # Gigabytes that are reserved and never touched, but for a few elements.
        far = 1 << 31
        base = torch.empty(far + (1 << 16), dtype=torch.float16)
        given = inputs(seqlen=2, heads=2, groups=2, dim=16, dtype=torch.float16, only=("z",))
        given["dt"] = given["dt"].half()
        strides = [1 << 15, 1 << 8, 1 << 8, 1]
        strides[dimension] = far
        for number, name in enumerate(("x", "B", "C", "z", "dt")):
            values = given[name]
            view = base.as_strided(values.shape, strides[: values.ndim], number * (1 << 11))
            given[name] = view.copy_(values)
        check(given)
