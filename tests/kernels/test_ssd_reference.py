"""The token-by-token SSD recurrence: against the formula written out in loops, and what each option means."""

import itertools
import math

import pytest
import torch

from automodel_kernels.ssd.reference import mamba_chunk_scan_combined_reference as scan

BATCH, SEQLEN, HEADS, HEAD_DIM, GROUPS, STATE = 2, 7, 4, 3, 2, 5


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(*, batch=BATCH, seqlen=SEQLEN, dtype=torch.float64):
    return {
        "x": normal(batch, seqlen, HEADS, HEAD_DIM, seed=1, dtype=dtype),
        "dt": normal(batch, seqlen, HEADS, seed=2, dtype=dtype),
        "A": -normal(HEADS, seed=3).exp().to(dtype),
        "B": normal(batch, seqlen, GROUPS, STATE, seed=4, dtype=dtype),
        "C": normal(batch, seqlen, GROUPS, STATE, seed=5, dtype=dtype),
        "chunk_size": 4,
    }


def test_it_is_the_formula():
    given = inputs()
    d, z, bias = normal(HEADS, seed=6), normal(BATCH, SEQLEN, HEADS, HEAD_DIM, seed=7), normal(HEADS, seed=8)
    initial = normal(BATCH, HEADS, HEAD_DIM, STATE, seed=9)
    y, final = scan(
        **given,
        D=d,
        z=z,
        dt_bias=bias,
        initial_states=initial,
        dt_softplus=True,
        dt_limit=(0.2, 1.5),
        return_final_states=True,
    )
    for row in range(BATCH):
        for head in range(HEADS):
            state = initial[row, head].tolist()
            group = head // (HEADS // GROUPS)
            for t in range(SEQLEN):
                dt = math.log1p(math.exp(given["dt"][row, t, head].item() + bias[head].item()))
                dt = min(max(dt, 0.2), 1.5)
                decay = math.exp(dt * given["A"][head].item())
                for p in range(HEAD_DIM):
                    x = given["x"][row, t, head, p].item()
                    b, c = given["B"][row, t, group].tolist(), given["C"][row, t, group].tolist()
                    state[p] = [decay * old + dt * x * b[n] for n, old in enumerate(state[p])]
                    expected = sum(s * each for s, each in zip(state[p], c, strict=True)) + d[head].item() * x
                    gate = z[row, t, head, p].item()
                    expected *= gate / (1 + math.exp(-gate))
                    assert y[row, t, head, p].item() == pytest.approx(expected, rel=1e-11, abs=1e-13)
            torch.testing.assert_close(final[row, head], torch.tensor(state, dtype=torch.float64))


def test_a_document_of_seq_idx_is_a_run_of_equal_ids_and_ids_may_come_back():
    given, initial = inputs(batch=1), normal(1, HEADS, HEAD_DIM, STATE)
    ids = torch.tensor([[5, 5, 2, 5, 5, 5, -1]])
    y, final = scan(**given, seq_idx=ids, initial_states=initial, return_final_states=True)
    for begin, end in ((0, 2), (2, 3), (3, 6), (6, 7)):
        part = {name: each[:, begin:end] if name in {"x", "dt", "B", "C"} else each for name, each in given.items()}
        alone, last = scan(**part, initial_states=None if begin else initial, return_final_states=True)
        torch.testing.assert_close(y[:, begin:end], alone)
    torch.testing.assert_close(final, last)


def test_documents_of_cu_seqlens_are_alone_and_have_states_of_their_own():
    given, bounds = inputs(batch=1), [0, 0, 3, 4, 4, 7]
    initial = normal(5, HEADS, HEAD_DIM, STATE)
    y, final, each_final = scan(
        **given,
        cu_seqlens=torch.tensor(bounds),
        initial_states=initial,
        return_final_states=True,
        return_varlen_states=True,
    )
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: each[:, begin:end] if name in {"x", "dt", "B", "C"} else each for name, each in given.items()}
        alone, last = scan(**part, initial_states=initial[number : number + 1], return_final_states=True)
        torch.testing.assert_close(y[:, begin:end], alone)
        torch.testing.assert_close(each_final[number : number + 1], last)
    assert torch.equal(final, each_final[-1:])
    assert torch.equal(each_final[0], initial[0]), "an empty document keeps its state"


def test_an_empty_document_without_initial_states_ends_in_zeros():
    states = scan(**inputs(batch=1), cu_seqlens=torch.tensor([0, 7, 7]), return_varlen_states=True)[1]
    assert states[0].any()
    assert not states[1].any()


def test_both_kinds_of_packing_together():
    given, ids = inputs(batch=1), torch.tensor([[0, 1, 1, 1, 0, 0, 0]])
    both = scan(**given, seq_idx=ids, cu_seqlens=torch.tensor([0, 3, 7]))
    torch.testing.assert_close(both, scan(**given, cu_seqlens=torch.tensor([0, 1, 3, 4, 7])))


def test_d_per_channel():
    given, d = inputs(), normal(HEADS, HEAD_DIM)
    torch.testing.assert_close(scan(**given, D=d), scan(**given) + given["x"] * d)
    torch.testing.assert_close(scan(**given, D=d[:, 0]), scan(**given, D=d[:, :1].expand(-1, HEAD_DIM)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(dtype):
    given = inputs(dtype=dtype)
    y, final = scan(**given, D=normal(HEADS), return_final_states=True)
    wide = {name: each if isinstance(each, int) else each.float() for name, each in given.items()}
    expected, state = scan(**wide, D=normal(HEADS).float(), return_final_states=True)
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(final, state)


def test_no_tokens():
    y, final = scan(**inputs(seqlen=0), return_final_states=True)
    assert y.shape == (BATCH, 0, HEADS, HEAD_DIM)
    assert not final.any()


def test_autograd_goes_through_every_floating_input():
    given = {name: each if isinstance(each, int) else each.requires_grad_() for name, each in inputs().items()}
    options = {
        "D": normal(HEADS).requires_grad_(),
        "z": normal(BATCH, SEQLEN, HEADS, HEAD_DIM).requires_grad_(),
        "dt_bias": normal(HEADS).requires_grad_(),
        "initial_states": normal(BATCH, HEADS, HEAD_DIM, STATE).requires_grad_(),
    }
    y = scan(**given, **options, dt_softplus=True)
    tensors = [each for each in (given | options).values() if isinstance(each, torch.Tensor)]
    assert all(each.isfinite().all() and each.any() for each in torch.autograd.grad(y.sum(), tensors))
