import itertools

import pytest
import torch

from automodel_kernels.gdn import layout
from automodel_kernels.gdn.chunked import Gates, gdn_backward_torch, gdn_forward_torch, saved_shapes
from automodel_kernels.gdn.reference import chunk_gated_delta_rule_reference
from automodel_kernels.gdn.segment import invert_unit_lower
from automodel_kernels.tuning.accuracy import relative_rms
from tensor_sizes import LargestTensor

torch.set_num_threads(1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def uniform(*shape, seed):
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64)


def make(
    batch=2,
    tokens=70,
    heads=2,
    value_heads=4,
    key_dim=32,
    value_dim=32,
    *,
    decay=1.0,
    most_beta=1.0,
    documents=(),
    initial=True,
    dtype=torch.float32,
):
    """Inputs with g in [-decay, 0] and beta in [0, most_beta]; normalised keys are asked for by `options`."""
    sequences = len(documents) or batch
    inputs = {
        "q": normal(batch, tokens, heads, key_dim, seed=1).to(dtype),
        "k": normal(batch, tokens, heads, key_dim, seed=2).to(dtype),
        "v": normal(batch, tokens, value_heads, value_dim, seed=3).to(dtype),
        "g": (-decay * uniform(batch, tokens, value_heads, seed=4)).to(dtype),
        "beta": (most_beta * uniform(batch, tokens, value_heads, seed=5)).to(dtype),
    }
    states = (sequences, value_heads, key_dim, value_dim)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs["initial_state"] = normal(*states, seed=6).to(wide) if initial else None
    borders = torch.tensor((0, *documents)).cumsum(0) if documents else None
    return inputs, borders


NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def cotangents(o, final):
    generated = generator(9)
    return tuple(
        torch.randn(each.shape, generator=generated).to(torch.bfloat16).to(torch.float64) for each in (o, final)
    )


def exact(inputs, borders, *, l2norm=True, gates=None, scale=None, differentiate_final=True, dtype=torch.float64):
    """Everything from the reference in float64, or another type, by name."""
    gates = gates or Gates()
    given = {**inputs, "A_log": gates.A_log, "dt_bias": gates.dt_bias}
    wide = {
        name: None if each is None else each.detach().to(dtype, copy=True).requires_grad_()
        for name, each in given.items()
    }
    o, final = chunk_gated_delta_rule_reference(
        **wide,
        scale=scale,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=borders,
        use_gate_in_kernel=gates.A_log is not None,
        use_beta_sigmoid_in_kernel=gates.beta_sigmoid,
        allow_neg_eigval=gates.double_beta,
    )
    do, dfinal = cotangents(o, final)
    present = {name: each for name, each in wide.items() if each is not None}
    results = (o, final) if differentiate_final else (o,)
    given = (do.to(dtype), dfinal.to(dtype))[: len(results)]
    gradients = torch.autograd.grad(results, list(present.values()), given)
    return {"o": o, "final": final} | dict(zip(present, gradients, strict=True))


def chunked(inputs, borders, *, l2norm=True, gates=None, scale=None, differentiate_final=True, chunk_size=64):
    """The same from the path under test."""
    options = {
        "scale": inputs["q"].shape[3] ** -0.5 if scale is None else scale,
        "l2norm": l2norm,
        "cu_seqlens": borders,
        "chunk_size": chunk_size,
        "gates": gates or Gates(),
    }
    forward = gdn_forward_torch(**inputs, **options)
    do, dfinal = cotangents(forward.o, forward.final_state)
    found = gdn_backward_torch(
        do.to(forward.o.dtype),
        dfinal.to(forward.final_state.dtype) if differentiate_final else None,
        forward.saved,
        **inputs,
        **options,
    )
    gradients = {name: getattr(found, name) for name in NAMES if getattr(found, name) is not None}
    return {"o": forward.o, "final": forward.final_state} | gradients


def check(inputs, borders, *, tolerance=1e-6, **options):
    expected, found = exact(inputs, borders, **options), chunked(inputs, borders, **options)
    assert found.keys() == expected.keys()
    errors = {name: relative_rms(found[name], each) for name, each in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


SHAPES = {
    "one token": {"tokens": 1},
    "less than a chunk": {"tokens": 9},
    "a chunk": {"tokens": 32},
    "ragged": {"tokens": 67},
    "no groups": {"value_heads": 2},
    "groups of three, odd sizes": {"heads": 1, "value_heads": 3, "key_dim": 48, "value_dim": 33},
    "no initial state": {"initial": False},
    "documents": {"batch": 1, "documents": (0, 1, 32, 31, 0, 5, 1)},
    "one document": {"batch": 1, "documents": (70,), "initial": False},
}


@pytest.mark.parametrize("case", SHAPES)
def test_everything_is_exact_to_float32(case):
    check(*make(**SHAPES[case]))


@pytest.mark.parametrize("case", ["ragged", "documents", "no initial state"])
def test_segments_of_one_and_two_chunks(case, monkeypatch):
    for steps in (1, 2):
        monkeypatch.setattr(layout, "SEGMENT_ELEMENTS", steps * SHAPES[case].get("batch", 2) * 4 * 32 * 32)
        check(*make(**SHAPES[case]))


@pytest.mark.parametrize("case", ["ragged", "documents", "no initial state"])
def test_everything_is_exact_to_float64(case):
    check(*make(**SHAPES[case], dtype=torch.float64), tolerance=1e-13)


@pytest.mark.parametrize(
    ("decay", "most_beta", "tolerance"), [(5, 1, 1e-6), (0.01, 1, 1e-6), (50, 2, 1e-5), (0, 2, 1e-5)]
)
def test_strong_and_no_decay_and_negative_eigenvalues(decay, most_beta, tolerance):
    check(*make(tokens=200, batch=1, decay=decay, most_beta=most_beta), tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1.5e-3), (torch.bfloat16, 1e-2)])
def test_sixteen_bits(dtype, tolerance):
    check(*make(dtype=dtype, decay=5), tolerance=tolerance)


def test_sixteen_bit_activations_beside_float32_gates():
    inputs, borders = make(dtype=torch.bfloat16)
    inputs["g"] = inputs["g"].float() * 1.01
    found = chunked(inputs, borders)
    check(inputs, borders, tolerance=1e-2)
    assert [found[name].dtype for name in ("o", "final", "q", "g", "beta", "initial_state")] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]


def test_keys_as_they_are_and_another_scale():
    inputs, borders = make()
    inputs["k"] = inputs["k"] * 32**-0.5
    check(inputs, borders, l2norm=False, scale=-1.7)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunks_of_every_size_give_the_same(chunk_size):
    inputs, borders = make()
    expected, found = exact(inputs, borders), chunked(inputs, borders, chunk_size=chunk_size)
    assert {name: relative_rms(found[name], each) for name, each in expected.items() if
            relative_rms(found[name], each) > 1e-6} == {}  # fmt: skip


GATES = {
    "all": {"A_log": True, "dt_bias": True, "beta_sigmoid": True, "double_beta": True},
    "gate": {"A_log": True},
    "beta": {"beta_sigmoid": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", GATES)
def test_gates_and_their_gradients(case, dtype):
    inputs, borders = make(dtype=dtype)
    given = dict(GATES[case])
    if "A_log" in given:
        inputs["g"] = normal(2, 70, 4, seed=7).to(dtype)
        given["A_log"] = normal(4, seed=8).to(dtype)
    if "dt_bias" in given:
        given["dt_bias"] = normal(4, seed=9).to(dtype)
    if "beta_sigmoid" in given:
        inputs["beta"] = normal(2, 70, 4, seed=10).to(dtype)
    # PyTorch's softplus is the identity from 20 on, in both.
    check(inputs, borders, gates=Gates(**given), tolerance=1e-6 if dtype == torch.float32 else 1e-13)


def test_without_a_gradient_of_the_final_state():
    check(*make(), differentiate_final=False)
    check(*make(batch=1, documents=(30, 0, 40)), differentiate_final=False)


def test_any_strides():
    inputs, borders = make(tokens=40)
    strided = dict(inputs)
    for name in ("q", "k", "v"):
        strided[name] = inputs[name].transpose(1, 3).contiguous().transpose(1, 3)
    for name in ("g", "beta"):
        strided[name] = torch.stack((inputs[name], inputs[name]), dim=-1)[..., 0]
    strided["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    expected, found = chunked(inputs, borders), chunked(strided, borders)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_an_expanded_gradient_of_the_output():
    inputs, _ = make(tokens=40)
    options = {"scale": 1.0, "l2norm": True, "cu_seqlens": None, "chunk_size": 64}
    forward = gdn_forward_torch(**inputs, **options)
    one = torch.ones(())
    found = gdn_backward_torch(one.expand(forward.o.shape), None, forward.saved, **inputs, **options)
    full = gdn_backward_torch(torch.ones_like(forward.o), None, forward.saved, **inputs, **options)
    assert torch.equal(found.k, full.k)


@pytest.mark.parametrize("initial", [True, False])
def test_packed_documents_equal_separate_ones(initial):
    documents = (40, 1, 0, 64, 25)
    inputs, borders = make(batch=1, tokens=130, documents=documents, initial=initial)
    packed = chunked(inputs, borders)
    do, dfinal = cotangents(packed["o"], packed["final"])
    options = {"scale": 32**-0.5, "l2norm": True, "cu_seqlens": None, "chunk_size": 64}
    for number, (begin, end) in enumerate(itertools.pairwise(borders.tolist())):
        alone = {name: None if x is None else x[:, begin:end] for name, x in inputs.items()}
        state = slice(number, number + 1)
        alone["initial_state"] = inputs["initial_state"][state] if initial else None
        forward = gdn_forward_torch(**alone, **options)
        found = gdn_backward_torch(do[:, begin:end].float(), dfinal[state].float(), forward.saved, **alone, **options)
        close = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(packed["o"][:, begin:end], forward.o, **close)
        torch.testing.assert_close(packed["final"][state], forward.final_state, **close)
        for name in ("q", "k", "v", "g", "beta"):
            torch.testing.assert_close(packed[name][:, begin:end], getattr(found, name), rtol=1e-4, atol=1e-5)
        if initial:
            torch.testing.assert_close(packed["initial_state"][state], found.initial_state, **close)


def test_another_document_and_its_nan_stay_outside():
    inputs, borders = make(batch=1, documents=(33, 37), initial=False)
    expected = chunked(inputs, borders)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 33:] = torch.nan
    forward = gdn_forward_torch(**inputs, scale=32**-0.5, l2norm=True, cu_seqlens=borders, chunk_size=64)
    assert torch.equal(forward.o[:, :33], expected["o"][:, :33])
    assert torch.equal(forward.final_state[0], expected["final"][0])


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_do(batch, tokens):
    inputs, borders = make(batch=batch, tokens=tokens)
    found = chunked(inputs, borders)
    if not tokens:
        assert torch.equal(found["final"], inputs["initial_state"])
        assert torch.equal(found["initial_state"], cotangents(found["o"], found["final"])[1].float())
    assert all(found[name].shape == inputs[name].shape for name in inputs)


def test_the_first_token_has_no_decay_to_learn_without_an_initial_state():
    found = chunked(*make(tokens=40, initial=False, decay=50))
    assert not found["g"][:, 0].any()
    assert found["g"][:, 1].any()


HARD = {
    "no beta": {"most_beta": 0.0},
    "beta one": {"beta": 1.0},
    "beta two": {"beta": 2.0},
    "strong decay": {"g": -50.0},
    "endless decay": {"g": -torch.inf},
    "huge decay": {"g": -1e30},
}


@pytest.mark.parametrize("keys", ["repeated", "zero"])
@pytest.mark.parametrize("case", HARD)
def test_hard_inputs_stay_exact(case, keys):
    inputs, borders = make(batch=1, tokens=100, decay=0.0)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone() if keys == "repeated" else inputs["k"] * 0
    for name, value in HARD[case].items():
        if name in inputs:
            inputs[name] = torch.full_like(inputs[name], value)
        else:
            inputs["beta"] = inputs["beta"] * value
    expected, found = exact(inputs, borders), chunked(inputs, borders)
    # Without decay and with beta 2 nothing is forgotten, rounding errors neither: token by token is no better.
    plain = exact(inputs, borders, dtype=torch.float32)
    for name, each in expected.items():
        assert found[name].isfinite().all(), name
        if name == "g" and case in ("endless decay", "huge decay", "strong decay"):
            assert found[name].abs().max() < 1e-20, name
        elif keys == "repeated" or name != "k":
            allowed = max(1e-5, 2 * relative_rms(plain[name], each))
            # Gradients that vanish against the others are what rounding leaves of them.
            assert relative_rms(found[name], each) < allowed or each.abs().max() < 1e-6, name


def test_sixty_five_thousand_tokens():
    inputs, borders = make(
        batch=1, tokens=65_536, heads=1, value_heads=1, key_dim=16, value_dim=16, most_beta=2.0, decay=0.1
    )
    found = chunked(inputs, borders)
    assert all(each.isfinite().all() for each in found.values())
    # The state of long ago is forgotten, so that the last tokens alone give the same.
    late, _ = make(batch=1, tokens=1, heads=1, value_heads=1, key_dim=16, value_dim=16, initial=False)
    late = {name: None if each is None else inputs[name][:, -1000:] for name, each in late.items()}
    o, _ = chunk_gated_delta_rule_reference(
        **{name: each if each is None else each.double() for name, each in late.items()}, use_qk_l2norm_in_kernel=True
    )
    assert relative_rms(found["o"][:, -100:], o[:, -100:]) < 1e-6


def test_saved_shapes_follow_from_shapes_alone():
    for case in ("ragged", "documents", "one token"):
        inputs, borders = make(**SHAPES[case])
        forward = gdn_forward_torch(**inputs, scale=1.0, l2norm=True, cu_seqlens=borders, chunk_size=64)
        q, v = (inputs[name].to("meta") for name in ("q", "v"))
        fake = None if borders is None else borders.to("meta")
        shapes = saved_shapes(q, v, cu_seqlens=fake, chunk_size=64)
        assert shapes == tuple(tuple(each.shape) for each in forward.saved)
        assert {each.dtype for each in forward.saved} == {torch.float32}


def test_values_are_not_read_again_for_the_backward():
    inputs, _ = make(tokens=40)
    options = {"scale": 1.0, "l2norm": True, "cu_seqlens": None, "chunk_size": 64}
    forward = gdn_forward_torch(**inputs, **options)
    do = torch.ones_like(forward.o)
    expected = gdn_backward_torch(do, None, forward.saved, **inputs, **options)
    kept = [each.clone() for each in forward.saved]
    found = gdn_backward_torch(do, None, forward.saved, **inputs | {"v": inputs["v"] * torch.nan}, **options)
    for name in NAMES[:6]:
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert all(torch.equal(each, before) for each, before in zip(forward.saved, kept, strict=True))


def test_equal_inputs_give_equal_bits():
    inputs, borders = make(batch=1, documents=(33, 37))
    first, second = chunked(inputs, borders), chunked(inputs, borders)
    assert all(torch.equal(second[name], each) for name, each in first.items())


def test_no_temporary_is_larger_than_the_values():
    tokens = 8192
    inputs, borders = make(batch=1, tokens=tokens, heads=2, value_heads=4, key_dim=64, value_dim=64, initial=False)
    with LargestTensor() as largest:
        options = {"scale": 1.0, "l2norm": True, "cu_seqlens": borders, "chunk_size": 64}
        forward = gdn_forward_torch(**inputs, **options)
        gdn_backward_torch(forward.o, forward.final_state, forward.saved, **inputs, **options)
    assert largest.nbytes <= inputs["v"].nbytes


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("entries", [0.3, 2.0])
def test_the_inverse_is_exact_to_rounding(size, entries):
    # Entries of 2 are repeated keys with beta 2: powers of this matrix are huge, its inverse is not.
    matrix = torch.full((3, size, size), entries)
    matrix[0] = normal(size, size, seed=1).float() * 0.2
    out = torch.full_like(matrix, torch.nan)
    invert_unit_lower(matrix, out)
    lower = matrix.double().tril(-1) + torch.eye(size, dtype=torch.float64)
    product = lower @ out.double()
    residual = (product - torch.eye(size, dtype=torch.float64)).abs().amax((1, 2))
    scale = (lower.abs() @ out.double().abs()).amax((1, 2))
    assert (residual <= 4 * torch.finfo(torch.float32).eps * scale).all()
    assert not out.triu(1).any()
