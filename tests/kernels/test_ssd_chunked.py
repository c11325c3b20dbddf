"""The chunked torch path of SSD against the token-by-token recurrence in float64: values and gradients, all options."""

import pytest
import torch

from automodel_kernels.ssd import chunk_block
from automodel_kernels.ssd.chunk_layout import lay_out
from automodel_kernels.ssd.chunked import ssd_backward_torch, ssd_forward_torch
from automodel_kernels.ssd.reference import mamba_chunk_scan_combined_reference
from automodel_kernels.tuning.accuracy import relative_rms
from peak_memory import PeakMemory
from tensor_sizes import LargestTensor

FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
INF = float("inf")


@pytest.fixture(autouse=True)
def one_thread():
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    batch=1, seqlen=70, *, heads=4, head_dim=8, groups=1, state=16, sequences=None, dtype=torch.float32, bare=False
):
    shape = (batch, seqlen, heads, head_dim)
    given = {
        "x": normal(*shape, seed=1, dtype=dtype),
        "dt": normal(batch, seqlen, heads, seed=2, dtype=dtype) - 1,
        "A": -normal(heads, seed=3).exp(),
        "B": normal(batch, seqlen, groups, state, seed=4, dtype=dtype),
        "C": normal(batch, seqlen, groups, state, seed=5, dtype=dtype),
        "D": normal(heads, seed=6),
        "z": normal(*shape, seed=7, dtype=dtype),
        "dt_bias": normal(heads, seed=8),
        "initial_states": normal(sequences or batch, heads, head_dim, state, seed=9),
        "seq_idx": None,
        "cu_seqlens": None,
        "dt_softplus": True,
        "dt_limit": (0.0, INF),
    }
    return given | dict.fromkeys(("D", "z", "dt_bias", "initial_states")) if bare else given


def run(given):
    """Outputs and gradients of the chunked path, by name."""
    out, states = ssd_forward_torch(**given)
    assert out.dtype == given["x"].dtype
    found = ssd_backward_torch(
        normal(*out.shape, seed=20, dtype=out.dtype), normal(*states.shape, seed=21), [], **given
    )
    return {"out": out, "states": states} | {name: getattr(found, name) for name in FLOATING}


def expect(given):
    """The same of the reference, in float64."""
    wide = {
        name: each.detach().to(torch.float64).requires_grad_()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
        else each
        for name, each in given.items()
    }
    varlen = given["cu_seqlens"] is not None
    out, states = mamba_chunk_scan_combined_reference(
        **wide, chunk_size=1, return_final_states=not varlen, return_varlen_states=varlen
    )
    names = [name for name in FLOATING if wide[name] is not None]
    dout = normal(*out.shape, seed=20, dtype=given["x"].dtype)
    gradients = torch.autograd.grad(
        [out, states],
        [wide[name] for name in names],
        [dout.double(), normal(*states.shape, seed=21).double()],
        materialize_grads=True,
    )
    return {"out": out, "states": states} | dict.fromkeys(FLOATING) | dict(zip(names, gradients, strict=True))


def check(given, *, tolerance=1.5e-6, tolerance_a=5e-6):
    found, expected = run(given), expect(given)
    for name, each in expected.items():
        if each is None:
            assert found[name] is None
            continue
        assert found[name].shape == each.shape
        error = relative_rms(found[name], each)
        assert error <= (tolerance_a if name == "A" else tolerance), f"{name}: {error}"


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), [(2, 64), (16, 1), (5, 5), (2, 65), (1, 200)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients(batch, seqlen, groups, bare):
    check(inputs(batch, seqlen, groups=groups, bare=bare))


@pytest.mark.parametrize(("head_dim", "state"), [(64, 64), (8, 1), (1, 8), (32, 256)])
def test_sizes(head_dim, state):
    check(inputs(2, 70, head_dim=head_dim, state=state))


@pytest.mark.parametrize("blocks_of", [1, 2, 3])
@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_chunks_and_blocks_change_nothing_but_rounding(monkeypatch, chunk, blocks_of):
    monkeypatch.setattr(chunk_block, "CHUNKS", (chunk,))
    monkeypatch.setattr(chunk_block, "BLOCK_ELEMENTS", blocks_of * chunk * 4 * 8)
    check(inputs(2, 130, groups=2))
    ids = torch.tensor([0] * 5 + [1] * 80 + [0] * 5)[None]
    check(inputs(1, 90) | {"seq_idx": ids})
    bounds = torch.tensor([0, 0, 3, 75, 90, 90])
    check(inputs(1, 90, sequences=5) | {"cu_seqlens": bounds})


# Borders at the first and last token, next to each other, and at multiples of every chunk; ids that come back.
IDS = {
    "one": [0] * 70,
    "borders at chunks": [0] * 32 + [1] * 32 + [2] * 6,
    "beside chunks": [0] * 31 + [1] * 2 + [0] * 30 + [1] * 7,
    "single tokens": [0] + [1] * 68 + [0],
    "all different": list(range(70)),
    "back and forth": [0, 1] * 35,
    "negative": [3] * 40 + [-1] * 30,
}


@pytest.mark.parametrize("case", IDS)
def test_seq_idx_resets_the_state(case):
    ids = torch.tensor([IDS[case], IDS["beside chunks"], IDS["one"]])
    check(inputs(3, 70, groups=2) | {"seq_idx": ids})


LENGTHS = {
    "one": [70],
    "empty ones": [0, 33, 0, 0, 37, 0],
    "all empty": [0, 0],
    "at chunks": [32, 32, 6],
    "short": [1, 2, 3, 1, 63],
    "rising": [10, 20, 40],
}


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_documents_of_cu_seqlens(case, with_ids):
    bounds = torch.tensor([0, *LENGTHS[case]]).cumsum(0)
    given = inputs(1, int(bounds[-1]), sequences=len(bounds) - 1) | {"cu_seqlens": bounds}
    if with_ids:
        given["seq_idx"] = (torch.arange(int(bounds[-1])) // 9 % 2)[None].to(torch.int32)
    check(given)


def test_a_document_has_the_bits_that_it_has_alone():
    bounds = [0, 37, 37, 70]
    together = run(inputs(1, 70, sequences=3, bare=True) | {"cu_seqlens": torch.tensor(bounds)})
    whole = inputs(1, 70, bare=True)
    for begin, end in ((0, 37), (37, 70)):
        part = {name: each[:, begin:end] if name in {"x", "dt", "B", "C"} else each for name, each in whole.items()}
        # As many chunks of as many tokens as together.
        alone, _ = ssd_forward_torch(**part | {"cu_seqlens": torch.tensor([0, end - begin])})
        torch.testing.assert_close(together["out"][:, begin:end], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("name", ["x", "B", "C", "dt"])
def test_not_even_nan_leaks_out_of_a_document(packing, name):
    given = inputs(1, 70, sequences=2, bare=True)
    given |= {"seq_idx": torch.tensor([[0] * 33 + [1] * 37])} if packing == "seq_idx" else {}
    given |= {"cu_seqlens": torch.tensor([0, 33, 70])} if packing == "cu_seqlens" else {}
    out, _ = ssd_forward_torch(**given)
    for inside, outside in ((slice(0, 33), slice(33, 70)), (slice(33, 70), slice(0, 33))):
        poisoned = given | {name: given[name].clone()}
        poisoned[name][:, inside] = float("nan")
        found = ssd_forward_torch(**poisoned)[0]
        assert torch.equal(found[:, outside], out[:, outside])
        assert found[:, inside].isnan().any()
        gradient = ssd_backward_torch(torch.ones_like(out), None, [], **poisoned)
        assert gradient.x[:, outside].isfinite().all()
        assert gradient.dt[:, outside].isfinite().all()


def test_nothing_of_the_first_token_gets_into_padding():
    given = inputs(2, 70, bare=True)
    given["x"][0, 0], given["B"][0, 0] = INF, INF
    out, _ = ssd_forward_torch(**given)
    assert out[1].isfinite().all()


@pytest.mark.parametrize("a", [-16.0, -5.0, -1.0, -1e-3, 0.0])
def test_strong_and_weak_decay_lose_no_digits(a):
    given = inputs(2, 90, head_dim=32) | {"A": torch.full((4,), a), "dt_softplus": False, "dt_bias": None}
    given["dt"] = torch.rand(2, 90, 4, generator=torch.Generator().manual_seed(2)) * 0.4 + 0.8
    check(given)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, INF), (0.1, 0.5), (0.0, 0.0), (0.7, 0.7)])
def test_dt_is_clamped_and_gets_no_gradient_beyond(softplus, limit):
    given = inputs(2, 70) | {"dt_softplus": softplus, "dt_limit": limit}
    if limit[0] < limit[1]:
        check(given)
        return
    found = run(given)
    assert not found["dt"].any()
    assert not found["dt_bias"].any()
    assert relative_rms(found["out"], expect(given)["out"]) <= 1.5e-6


def test_d_per_channel():
    check(inputs(2, 70) | {"D": normal(4, 8)})


def test_no_gradient_of_the_final_states_is_a_gradient_of_zeros():
    given = inputs(2, 70)
    out, states = ssd_forward_torch(**given)
    absent, zeros = (ssd_backward_torch(out, each, [], **given) for each in (None, torch.zeros_like(states)))
    assert all(torch.equal(getattr(absent, name), getattr(zeros, name)) for name in FLOATING)


@pytest.mark.parametrize("seqlen", [0, 1])
def test_nearly_no_tokens(seqlen):
    given = inputs(2, seqlen)
    found = run(given)
    assert found["out"].shape == (2, seqlen, 4, 8)
    if not seqlen:
        assert torch.equal(found["states"], given["initial_states"])
        assert torch.equal(found["initial_states"], normal(*found["states"].shape, seed=21))
        assert not found["A"].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)], ids=str)
def test_sixteen_bit_activations_with_float32_parameters(dtype, tolerance):
    given = inputs(2, 130, groups=2, dtype=dtype)
    found = run(given)
    assert found["states"].dtype == torch.float32
    assert all(found[name].dtype == given[name].dtype for name in FLOATING)
    check(given, tolerance=tolerance, tolerance_a=tolerance)


def test_any_mixture_of_data_types():
    given = inputs(1, 40)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16]
    for name, dtype in zip(("x", "dt", "A", "B", "C"), dtypes, strict=True):
        given[name] = given[name].to(dtype)
    given["D"], given["dt_bias"] = given["D"].bfloat16(), given["dt_bias"].half()
    found = run(given)
    assert all(found[name].dtype == given[name].dtype for name in FLOATING)
    assert relative_rms(found["out"], expect(given)["out"]) <= 1.5e-6


@pytest.mark.parametrize("packing", ["none", "seq_idx", "cu_seqlens"])
def test_float64_gradients_are_those_of_autograd_to_its_digits(packing):
    given = inputs(1, 70, groups=2, sequences=2 if packing == "cu_seqlens" else 1)
    given |= {name: given[name].double() for name in FLOATING}
    given["seq_idx"] = torch.tensor([IDS["beside chunks"]]) if packing == "seq_idx" else None
    given["cu_seqlens"] = torch.tensor([0, 33, 70]) if packing == "cu_seqlens" else None
    check(given, tolerance=1e-13, tolerance_a=1e-13)


def test_strided_views():
    given = inputs(2, 70, groups=2)
    expected = run(given)
    rows = torch.cat([given[name].flatten(2) for name in ("x", "B", "C", "z")], dim=2)
    x, b, c, z = rows.split([32, 32, 32, 32], dim=2)
    given |= {"x": x.unflatten(2, (4, 8)), "z": z.unflatten(2, (4, 8))}
    given |= {"B": b.unflatten(2, (2, 16)), "C": c.unflatten(2, (2, 16))}
    given["dt"] = given["dt"].transpose(1, 2).contiguous().transpose(1, 2)
    given["initial_states"] = given["initial_states"].mT.contiguous().mT
    found = run(given)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_inputs_stay_as_they_are_and_equal_inputs_give_equal_bits():
    given = inputs(2, 150, groups=2)
    before = {name: each.clone() for name, each in given.items() if isinstance(each, torch.Tensor)}
    first, second = run(given), run(given)
    assert all(torch.equal(given[name], each) for name, each in before.items())
    assert all(torch.equal(second[name], each) for name, each in first.items())


def test_groups_are_not_repeated_and_no_tensor_is_larger_than_the_inputs(monkeypatch):
    monkeypatch.setattr(chunk_block, "BLOCK_ELEMENTS", 1 << 13)
    given = inputs(1, 4096, heads=8, head_dim=4, state=32, bare=True)
    with LargestTensor() as largest:
        run(given)
    # B for every head would be eight times as large, and the pairs of all chunks, too.
    assert given["B"].nbytes == given["x"].nbytes
    assert largest.nbytes <= given["x"].nbytes


@pytest.mark.parametrize("length", [None, 4], ids=["rows", "documents of 4"])
def test_long_sequences_take_little_memory(length):
    given = inputs(1, 8192, heads=4, head_dim=64, state=64, bare=True)
    given["seq_idx"] = None if length is None else torch.arange(8192)[None] // length
    run(inputs())
    with PeakMemory() as peak:
        run(given)
    # The output, its gradient, and the gradients of x, B and C are four times x; blocks take the rest.
    assert peak.growth <= 4 * given["x"].nbytes + (80 << 20)


def test_the_layout_gives_every_run_chunks_of_its_own():
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2, 2]])
    layout = lay_out(batch=2, seqlen=7, seq_idx=ids, cu_seqlens=None, costs={4: 1.0})
    # The first row has a chunk more, and so comes first.
    assert layout.sequences.tolist() == [0, 1]
    assert layout.steps == (0, 2, 4, 5)
    assert layout.tokens.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10], [4, 0, 0, 0], [11, 12, 13, 0], [5, 6, 0, 0]]
    assert layout.padding.sum(1).tolist() == [0, 0, 3, 1, 2]
    assert layout.fresh.tolist() == [False, False, False, False, True]


def test_the_layout_takes_the_chunk_that_costs_least_with_padding():
    costs = {64: 1.0, 8: 1.5}
    for length, chunk in ((64, 64), (16, 8), (8, 8), (1, 8), (128, 64)):
        bounds = torch.arange(11) * length
        layout = lay_out(batch=1, seqlen=10 * length, seq_idx=None, cu_seqlens=bounds, costs=costs)
        assert layout.tokens.shape == (10 * -(-length // chunk), chunk)


@pytest.mark.parametrize(("batch", "seqlen"), [(1, 64), (2, 65), (3, 1), (2, 0), (3, 130)])
def test_rows_are_laid_out_as_documents_are(batch, seqlen):
    rows = lay_out(batch=batch, seqlen=seqlen, seq_idx=None, cu_seqlens=None, costs={64: 1.0})
    ids = torch.zeros(batch, seqlen, dtype=torch.int64)
    general = lay_out(batch=batch, seqlen=seqlen, seq_idx=ids, cu_seqlens=None, costs={64: 1.0})
    assert torch.equal(rows.tokens, general.tokens)
    assert (rows.padding is None) == (general.padding is None)
    assert rows.padding is None or torch.equal(rows.padding, general.padding)
    assert (rows.steps, rows.sequences.tolist()) == (general.steps, general.sequences.tolist())
    assert rows.fresh is general.fresh is None
