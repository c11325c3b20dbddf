import pytest
import torch

from automodel_kernels.gdn.chunked import gdn_forward_torch
from automodel_kernels.gdn.recurrent import fused_recurrent_gated_delta_rule, gdn_recurrent
from automodel_kernels.gdn.reference import chunk_gated_delta_rule_reference
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.accuracy import relative_rms

torch.set_num_threads(1)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def path(request):
    """The test twice: in torch, and with the kernel under the interpreter, in fresh memory full of NaN."""
    if request.param == "triton":
        request.getfixturevalue("narrow_floats")
        request.getfixturevalue("poison")
    return request.param


on_both_paths = pytest.mark.usefixtures("path")


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(batch=2, tokens=3, heads=1, value_heads=2, key_dim=32, value_dim=24, *, sequences=None, dtype=torch.float32):
    states = (batch if sequences is None else sequences, value_heads, key_dim, value_dim)
    return {
        "q": normal(batch, tokens, heads, key_dim, seed=1, dtype=dtype),
        "k": normal(batch, tokens, heads, key_dim, seed=2, dtype=dtype),
        "v": normal(batch, tokens, value_heads, value_dim, seed=3, dtype=dtype),
        "g": -normal(batch, tokens, value_heads, seed=4).abs().to(dtype),
        "beta": normal(batch, tokens, value_heads, seed=5).sigmoid().to(dtype),
        "initial_state": normal(*states, seed=6, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def widened(inputs):
    floating = {name for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return {name: x.double() if name in floating else x for name, x in inputs.items()}


def check(inputs, *, tolerance=1e-6):
    expected, states = chunk_gated_delta_rule_reference(**widened(inputs))
    o, final = fused_recurrent_gated_delta_rule(**inputs)
    assert o.dtype == inputs["v"].dtype
    assert relative_rms(o, expected) <= tolerance
    assert final.dtype == (torch.float64 if o.dtype == torch.float64 else torch.float32)
    assert relative_rms(final, states) <= min(tolerance, 1e-6)


SHAPES = {
    "one token": {"tokens": 1},
    "several tokens": {},
    "more than the torch path steps through": {"tokens": 9},
    "no groups": {"value_heads": 1},
    "groups of three": {"heads": 2, "value_heads": 6},
    "largest heads": {"batch": 1, "tokens": 2, "key_dim": 256, "value_dim": 256},
    "odd heads": {"key_dim": 33, "value_dim": 17},
    "smallest heads": {"key_dim": 1, "value_dim": 1},
}


@on_both_paths
@pytest.mark.parametrize("case", SHAPES)
def test_float32_is_exact(case):
    check(make(**SHAPES[case]))


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["one token", "several tokens", "odd heads"])
def test_sixteen_bits_are_rounded_once(case, dtype):
    check(make(**SHAPES[case], dtype=dtype), tolerance=torch.finfo(dtype).eps / 3)


@on_both_paths
@pytest.mark.parametrize("case", ["one token", "more than the torch path steps through"])
def test_float64_is_computed_in_float64(case):
    check(make(**SHAPES[case], dtype=torch.float64), tolerance=1e-14)


@on_both_paths
def test_sixteen_bit_activations_beside_float32_gates():
    inputs = make(dtype=torch.bfloat16) | {"g": -normal(2, 3, 2, seed=7).abs(), "beta": normal(2, 3, 2, seed=8)}
    check(inputs, tolerance=1e-2)


@on_both_paths
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_beta_in_the_kernel(bias, tokens):
    inputs = make(tokens=tokens) | {
        "g": 10 * normal(2, tokens, 2, seed=7),
        "beta": normal(2, tokens, 2, seed=8),
        "use_gate_in_kernel": True,
        "A_log": normal(2, seed=9),
        "dt_bias": normal(2, seed=10) if bias else None,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": bias,
    }
    check(inputs)


@on_both_paths
def test_without_states_and_norm_and_with_another_scale():
    inputs = make() | {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
    expected, _ = chunk_gated_delta_rule_reference(**widened(inputs), scale=-0.3)
    o, final = fused_recurrent_gated_delta_rule(**inputs, scale=-0.3)
    assert final is None
    assert relative_rms(o, expected) <= 1e-6


@on_both_paths
def test_packed_documents_and_empty_ones():
    borders = torch.tensor([0, 0, 1, 5, 6, 6], dtype=torch.int32)
    check(make(batch=1, tokens=6, sequences=5) | {"cu_seqlens": borders})
    check(make(batch=1, tokens=6, sequences=1) | {"cu_seqlens": torch.tensor([0, 6])})


@on_both_paths
@pytest.mark.parametrize("given", [True, False])
def test_without_tokens_the_state_stays(given):
    inputs = make(tokens=0)
    inputs["initial_state"] = inputs["initial_state"] if given else None
    o, final = fused_recurrent_gated_delta_rule(**inputs)
    assert o.shape == (2, 0, 2, 24)
    assert torch.equal(final, inputs["initial_state"] if given else torch.zeros(2, 2, 32, 24))
    o, final = fused_recurrent_gated_delta_rule(**make(batch=0))
    assert (o.shape, final.shape) == ((0, 3, 2, 24), (0, 2, 32, 24))


@on_both_paths
@pytest.mark.parametrize("documents", [False, True])
def test_step_by_step_equals_one_call_and_the_chunks(documents):
    # Over the border of a chunk of 32.
    tokens = 35
    inputs = make(batch=1, tokens=tokens, value_heads=1, value_dim=16, sequences=2 if documents else 1)
    borders = torch.tensor([0, 20, 35]) if documents else None
    per_token = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    whole, final = fused_recurrent_gated_delta_rule(**per_token, **inputs, cu_seqlens=borders)
    chunks = gdn_forward_torch(
        **per_token,
        scale=32**-0.5,
        initial_state=inputs["initial_state"],
        l2norm=True,
        cu_seqlens=borders,
        chunk_size=64,
    )
    initial, steps, states = inputs.pop("initial_state"), [], []
    for number, (begin, end) in enumerate([(0, 20), (20, 35)] if documents else [(0, tokens)]):
        state = initial[number : number + 1] if documents else initial
        for t in range(begin, end):
            now = {name: x[:, t : t + 1] for name, x in per_token.items()}
            o, state = fused_recurrent_gated_delta_rule(**now, **inputs, initial_state=state)
            steps.append(o)
        states.append(state)
    for o, state in ((torch.cat(steps, 1), torch.cat(states)), (chunks.o, chunks.final_state)):
        assert relative_rms(o, whole) <= 1e-6
        assert relative_rms(state, final) <= 1e-6


@on_both_paths
@pytest.mark.parametrize("tokens", [3, 9])
def test_any_strides_and_nothing_is_changed(tokens):
    inputs = make(tokens=tokens)
    o, final = fused_recurrent_gated_delta_rule(**inputs)
    strided = dict(inputs)
    together = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], dim=2)
    for name, part in zip(("q", "k", "v"), together.split((32, 32, 48), dim=2), strict=True):
        strided[name] = part.unflatten(2, (-1, inputs[name].shape[3]))
    strided["g"], strided["beta"] = (inputs[name].mT.contiguous().mT for name in ("g", "beta"))
    strided["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    kept = {name: x.clone() for name, x in strided.items() if isinstance(x, torch.Tensor)}
    for _ in range(2):
        found = fused_recurrent_gated_delta_rule(**strided)
        # Matrix products of the torch path may add in another order.
        torch.testing.assert_close(found, (o, final), rtol=1e-5, atol=1e-6)
        strided["q"] = strided["q"].mT.contiguous().mT
    assert all(torch.equal(strided[name], x) for name, x in kept.items())
    assert final.data_ptr() != inputs["initial_state"].data_ptr()


@on_both_paths
def test_another_sequence_and_its_nan_stay_outside():
    borders = torch.tensor([0, 2, 5])
    inputs = make(batch=1, tokens=5, sequences=2) | {"cu_seqlens": borders}
    o, final = fused_recurrent_gated_delta_rule(**inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 2:] = torch.nan
    inputs["initial_state"][1] = torch.nan
    found, states = fused_recurrent_gated_delta_rule(**inputs)
    assert torch.equal(found[:, :2], o[:, :2])
    assert torch.equal(states[0], final[0])
    assert found[:, 2:].isnan().all()


@on_both_paths
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_strong_decay_and_repeated_and_zero_keys(beta):
    for keys in ("repeated", "zero"):
        inputs = make(tokens=4)
        inputs["g"][:, ::2] = -50
        inputs["beta"] = torch.full_like(inputs["beta"], beta)
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]) if keys == "repeated" else inputs["k"] * 0
        found = fused_recurrent_gated_delta_rule(**inputs)
        for each, expected in zip(found, chunk_gated_delta_rule_reference(**widened(inputs)), strict=True):
            torch.testing.assert_close(each.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
def test_offsets_beyond_32_bits_reach_their_row():
    inputs = make(batch=3, dtype=torch.float16)
    # Four gigabytes that are reserved and never touched, but for the three rows.
    stride = 1 << 30
    far = torch.empty(2 * stride + 1000, dtype=torch.float16).as_strided((3, 3, 2, 24), (stride, 48, 24, 1))
    expected, _ = fused_recurrent_gated_delta_rule(**inputs)
    o, _ = fused_recurrent_gated_delta_rule(**inputs | {"v": far.copy_(inputs["v"])})
    assert torch.equal(o, expected)


@pytest.mark.interpreter
def test_one_launch_moves_the_state_once(traffic):
    inputs = make(tokens=1, key_dim=32, value_dim=64)
    o, final = fused_recurrent_gated_delta_rule(**inputs)
    (launch,) = traffic
    assert launch.loaded("initial_ptr") == launch.stored("final_ptr") == final.nbytes
    assert launch.stored("o_ptr") == o.nbytes


def test_a_gradient_is_refused_clearly():
    for name in ("q", "beta", "initial_state"):
        inputs = make()
        inputs[name].requires_grad_()
        with pytest.raises(ValueError, match=f"{name} requires a gradient, .* chunk_gated_delta_rule instead"):
            fused_recurrent_gated_delta_rule(**inputs)
        with torch.no_grad():
            fused_recurrent_gated_delta_rule(**inputs)


def changed(**given):
    return make(batch=1) | given


REFUSED = {
    "q 3-D": (changed(q=normal(1, 3, 32, seed=1)), r"q must be \[batch, seqlen, heads, key_dim\], got .*\(1, 3, 32\)"),
    "v tokens": (changed(v=normal(1, 4, 2, 24, seed=1)), r"v must be \[1, 3, value_heads, value_dim\]"),
    "value heads": (changed(q=normal(1, 3, 3, 32, seed=1)), "v must have a multiple of q's 3 heads, got 2"),
    "wide keys": (changed(q=normal(1, 3, 1, 257, seed=1)), "q must have heads of 1 to 256 elements, got 257"),
    "wide values": (changed(v=normal(1, 3, 2, 300, seed=1)), "v must have heads of 1 to 256 elements, got 300"),
    "k": (changed(k=normal(1, 3, 1, 16, seed=1)), r"k must have the shape \(1, 3, 1, 32\), got \(1, 3, 1, 16\)"),
    "g": (changed(g=normal(1, 3, 1, seed=1)), r"g must have the shape \(1, 3, 2\)"),
    "beta": (changed(beta=normal(1, 2, 3, seed=1)), r"beta must have the shape \(1, 3, 2\)"),
    "state": (changed(initial_state=normal(2, 2, 32, 24, seed=1)), r"initial_state must have .* \(1, 2, 32, 24\)"),
    "integers": (changed(q=torch.ones(1, 3, 1, 32, dtype=torch.int32)), "q must be float16, .*, got torch.int32"),
    "device": (changed(v=torch.empty(1, 3, 2, 24, device="meta")), "v must be on q's device cpu, got meta"),
    "scale": (changed(scale=float("nan")), "scale must be finite, got nan"),
    "no A_log": (changed(use_gate_in_kernel=True), "A_log must be given"),
    "A_log alone": (changed(A_log=torch.ones(2)), "A_log has a meaning with use_gate_in_kernel=True only"),
    "dt_bias alone": (changed(dt_bias=torch.ones(2)), "dt_bias has a meaning with use_gate_in_kernel=True only"),
    "doubled": (changed(allow_neg_eigval=True), "allow_neg_eigval=True .* needs use_beta_sigmoid_in_kernel"),
    "documents of two rows": (
        make() | {"cu_seqlens": torch.tensor([0, 3])},
        "q must have a batch of 1 with cu_seqlens",
    ),
    "float documents": (changed(cu_seqlens=torch.tensor([0.0, 3.0])), "cu_seqlens must be int32 or int64"),
    "no documents": (changed(cu_seqlens=torch.tensor([0])), r"cu_seqlens must be .* got .* \(1,\)"),
    "too few tokens": (changed(cu_seqlens=torch.tensor([0, 2])), r"cu_seqlens must run from 0 to the 3 tokens"),
    "decreasing": (
        changed(cu_seqlens=torch.tensor([0, 2, 1, 3]), initial_state=None),
        r"cu_seqlens must .* not decrease, got \[0, 2, 1, 3\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(case):
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fused_recurrent_gated_delta_rule(**given)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("need_final", [True, False])
def test_it_is_a_sound_custom_operator(need_final, tokens):
    inputs = make(batch=1, tokens=tokens, dtype=torch.bfloat16)
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    rest = (None, None, False, False)
    arguments = (*tensors, 0.2, inputs["initial_state"], need_final, True, None, *rest)
    torch.library.opcheck(gdn_recurrent, arguments, test_utils=("test_schema", "test_faketensor"))
    packed = (*tensors, 0.2, None, need_final, True, torch.tensor([0, tokens, tokens]), *rest)
    torch.library.opcheck(gdn_recurrent, packed, test_utils=("test_schema", "test_faketensor"))


def test_it_traces_as_a_whole():
    inputs = make(tokens=1)
    compiled = torch.compile(fused_recurrent_gated_delta_rule, fullgraph=True, backend="eager")
    with torch.no_grad():
        found, expected = compiled(**inputs), fused_recurrent_gated_delta_rule(**inputs)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def test_batch_and_lengths_and_strides_share_one_binary(triton_cache):
    with target_driver("sm_90") as driver:
        for batch, tokens, value_heads in [(1, 1, 2), (3, 1, 4), (2, 16, 6), (1, 4097, 2)]:
            inputs = make(batch=batch, tokens=tokens, value_heads=value_heads, key_dim=64, value_dim=64)
            fused_recurrent_gated_delta_rule(**inputs)
        assert len(driver.launches) == 4
        assert len(driver.compiled) == 1
        fused_recurrent_gated_delta_rule(**make(key_dim=64, value_dim=65))
        assert len(driver.compiled) == 2
