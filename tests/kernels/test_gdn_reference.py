import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from automodel_kernels.gdn.reference import accumulator_dtype, chunk_gated_delta_rule_reference, sequence_bounds

torch.set_num_threads(1)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(batch=1, tokens=6, heads=1, value_heads=2, key_dim=4, value_dim=3, dtype=torch.float64):
    return {
        "q": normal(batch, tokens, heads, key_dim, seed=1, dtype=dtype),
        "k": normal(batch, tokens, heads, key_dim, seed=2, dtype=dtype),
        "v": normal(batch, tokens, value_heads, value_dim, seed=3, dtype=dtype),
        "g": -normal(batch, tokens, value_heads, seed=4, dtype=dtype).abs(),
        "beta": normal(batch, tokens, value_heads, seed=5, dtype=dtype).sigmoid(),
    }


def test_it_is_the_formula_written_with_matrices():
    inputs = make(heads=2, value_heads=6)
    o, final = chunk_gated_delta_rule_reference(**inputs, scale=0.3, output_final_state=True)
    q, k, v, g, beta = (inputs[name][0] for name in ("q", "k", "v", "g", "beta"))
    for head in range(6):
        state = torch.zeros(4, 3, dtype=torch.float64)
        for t in range(6):
            key = k[t, head // 3][:, None]
            erase = torch.eye(4, dtype=torch.float64) - beta[t, head] * key @ key.T
            state = g[t, head].exp() * erase @ state + beta[t, head] * key @ v[t, head][None]
            torch.testing.assert_close(o[0, t, head], 0.3 * state.T @ q[t, head // 3], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[0, head], state, rtol=1e-12, atol=1e-12)


def test_transformers_computes_the_same():
    inputs = make(batch=2, tokens=9, heads=2, value_heads=4, key_dim=8, value_dim=6, dtype=torch.float32)
    initial = normal(2, 4, 8, 6, seed=7, dtype=torch.float32)
    theirs = torch_recurrent_gated_delta_rule(
        *(inputs[name].repeat_interleave(2, dim=2) for name in ("q", "k")),
        *(inputs[name] for name in ("v", "g", "beta")),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ours = chunk_gated_delta_rule_reference(
        **inputs, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gate_and_beta_in_the_kernel_are_those_outside():
    inputs = make(value_heads=3)
    inputs["g"], inputs["beta"] = normal(1, 6, 3, seed=8), normal(1, 6, 3, seed=9)
    rate, bias = normal(3, seed=10), normal(3, seed=11)
    for given in (bias, None):
        shift = 0 if given is None else given
        outside = inputs | {
            "g": -rate.exp() * torch.log1p((inputs["g"] + shift).exp()),
            "beta": 2 / (1 + (-inputs["beta"]).exp()),
        }
        expected, _ = chunk_gated_delta_rule_reference(**outside)
        o, _ = chunk_gated_delta_rule_reference(
            **inputs,
            use_gate_in_kernel=True,
            A_log=rate,
            dt_bias=given,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
        )
        torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
    halved = inputs | {"beta": inputs["beta"].sigmoid()}
    o, _ = chunk_gated_delta_rule_reference(**inputs, use_beta_sigmoid_in_kernel=True)
    torch.testing.assert_close(o, chunk_gated_delta_rule_reference(**halved)[0])


def test_normalised_queries_and_keys_are_those_outside():
    inputs = make()
    outside = inputs | {
        name: inputs[name] / (inputs[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k")
    }
    expected, _ = chunk_gated_delta_rule_reference(**outside)
    o, _ = chunk_gated_delta_rule_reference(**inputs, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


def test_packed_documents_are_separate_ones_and_empty_ones_keep_their_state():
    inputs, initial = make(tokens=7), normal(4, 2, 4, 3, seed=6)
    borders = [0, 0, 2, 7, 7]
    o, final = chunk_gated_delta_rule_reference(
        **inputs, initial_state=initial, output_final_state=True, cu_seqlens=torch.tensor(borders)
    )
    for number in (1, 2):
        begin, end = borders[number : number + 2]
        each, state = chunk_gated_delta_rule_reference(
            **{name: x[:, begin:end] for name, x in inputs.items()},
            initial_state=initial[number : number + 1],
            output_final_state=True,
        )
        assert torch.equal(o[:, begin:end], each)
        assert torch.equal(final[number : number + 1], state)
    assert torch.equal(final[0], initial[0])
    assert torch.equal(final[3], initial[3])


def test_without_tokens_the_state_stays():
    initial = normal(2, 2, 4, 3)
    o, final = chunk_gated_delta_rule_reference(
        **make(batch=2, tokens=0), initial_state=initial, output_final_state=True
    )
    assert o.shape == (2, 0, 2, 3)
    assert torch.equal(final, initial)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(dtype):
    inputs = make(dtype=dtype)
    o, final = chunk_gated_delta_rule_reference(**inputs, output_final_state=True)
    wide, wide_final = chunk_gated_delta_rule_reference(
        **{name: x.float() for name, x in inputs.items()}, output_final_state=True
    )
    assert o.dtype == dtype
    assert torch.equal(o, wide.to(dtype))
    assert torch.equal(final, wide_final)
    assert chunk_gated_delta_rule_reference(**inputs)[1] is None


def test_autograd_differentiates_it():
    inputs = make(tokens=3)
    names = [*inputs, "initial_state"]
    tensors = [*inputs.values(), normal(1, 2, 4, 3)]

    def run(*given):
        named = dict(zip(names, given, strict=True))
        return chunk_gated_delta_rule_reference(**named, output_final_state=True, use_qk_l2norm_in_kernel=True)

    assert torch.autograd.gradcheck(run, [each.requires_grad_() for each in tensors])


def test_sequences_and_what_is_computed_in():
    v = torch.empty(2, 5, 1, 1)
    assert sequence_bounds(v, None) == [(0, 0, 5), (1, 0, 5)]
    assert sequence_bounds(v[:1], torch.tensor([0, 2, 2, 5])) == [(0, 0, 2), (0, 2, 2), (0, 2, 5)]
    assert accumulator_dtype(v, v.bfloat16()) == torch.float32
    assert accumulator_dtype(v, v.double()) == torch.float64
