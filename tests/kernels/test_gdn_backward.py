"""The Gated DeltaNet backward kernels under the interpreter: every gradient against autograd of the recurrence."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from automodel_kernels.gdn.backward import gdn_backward_triton
from automodel_kernels.gdn.forward import Forward, gdn_forward_triton
from automodel_kernels.gdn.reference import chunk_gated_delta_rule_reference
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.accuracy import relative_rms
from kernel_memory import Guarded

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


@dataclasses.dataclass(kw_only=True)
class Case:
    """Inputs of a forward and backward, and how to run them."""

    tensors: dict[str, torch.Tensor | None]
    do: torch.Tensor
    dfinal: torch.Tensor | None
    l2norm: bool = False
    gate: bool = False
    sigmoid: bool = False
    neg_eigval: bool = False
    borders: list[int] | None = None
    chunk: int = 64
    segment: int | None = None

    @property
    def cu_seqlens(self):
        return None if self.borders is None else torch.tensor(self.borders, dtype=torch.int32)


def make(
    *,
    batch=1,
    tokens=70,
    heads=1,
    value_heads=2,
    head_k=32,
    head_v=32,
    dtype=torch.float32,
    gate_dtype=torch.float32,
    gate=False,
    bias=False,
    sigmoid=False,
    initial=False,
    final=True,
    strongest=-5.0,
    borders=None,
    seed=0,
    **options,
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    sequences = batch if borders is None else len(borders) - 1
    q, k = normal(batch, tokens, heads, head_k), normal(batch, tokens, heads, head_k)
    if not options.get("l2norm"):
        k = k / k.norm(dim=-1, keepdim=True)
    v, do = normal(batch, tokens, value_heads, head_v), normal(batch, tokens, value_heads, head_v)
    shape = (batch, tokens, value_heads)
    g = normal(*shape) if gate else strongest * torch.rand(shape, generator=generator)
    beta = normal(*shape) if sigmoid else torch.rand(shape, generator=generator)
    state = (sequences, value_heads, head_k, head_v)
    tensors = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": g.to(gate_dtype),
        "beta": beta.to(gate_dtype),
        "A_log": normal(value_heads) if gate else None,
        "dt_bias": normal(value_heads) if bias else None,
        "initial_state": normal(*state) if initial else None,
    }
    # Of the outputs' size, so that the last token's gradients are no small differences of large numbers.
    dfinal = head_k**-0.5 * normal(*state) if final else None
    return Case(tensors=tensors, do=do.to(dtype), dfinal=dfinal, gate=gate, sigmoid=sigmoid, borders=borders, **options)


def run(case, *, saved=None):
    """The forward's results and the gradients of the kernels."""
    tensors = dict(case.tensors)
    initial = tensors.pop("initial_state")
    options = {
        "scale": tensors["q"].shape[-1] ** -0.5,
        "gate": case.gate,
        "beta_sigmoid": case.sigmoid,
        "neg_eigval": case.neg_eigval,
        "cu_seqlens": case.cu_seqlens,
        "segment": case.segment,
    }
    if saved is None:
        saved = gdn_forward_triton(
            **tensors, **options, initial_state=initial, l2norm=case.l2norm, chunk_size=case.chunk, save=True
        )
    return saved, gdn_backward_triton(
        case.do, case.dfinal, saved, **tensors, **options, need_initial=initial is not None
    )


def expected_gradients(case):
    """By name, from autograd in float64."""
    wide = {name: each.double().requires_grad_() for name, each in case.tensors.items() if each is not None}
    o, final_state = chunk_gated_delta_rule_reference(
        **{name: wide[name] for name in ("q", "k", "v", "g", "beta")},
        initial_state=wide.get("initial_state"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.l2norm,
        cu_seqlens=case.cu_seqlens,
        use_gate_in_kernel=case.gate,
        A_log=wide.get("A_log"),
        dt_bias=wide.get("dt_bias"),
        use_beta_sigmoid_in_kernel=case.sigmoid,
        allow_neg_eigval=case.neg_eigval,
    )
    loss = (o * case.do.double()).sum()
    if case.dfinal is not None:
        loss = loss + (final_state * case.dfinal.double()).sum()
    return dict(zip(wide, torch.autograd.grad(loss, list(wide.values())), strict=True))


def errors(case):
    """The relative RMS error of every gradient."""
    expected = expected_gradients(case)
    _, got = run(case)
    for name, each in case.tensors.items():
        gradient = getattr(got, name)
        assert (gradient is None) == (each is None)
        if each is not None:
            assert gradient.shape == each.shape
            assert gradient.dtype == each.dtype
    return {name: relative_rms(getattr(got, name), each) for name, each in expected.items()}


def check(case, *, factor=1.0):
    bound = factor * TOLERANCE[case.tensors["q"].dtype]
    found = errors(case)
    assert max(found.values()) <= bound, found


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 32), (15, 16), (17, 32), (33, 16)])
def test_any_number_of_tokens_and_chunk(tokens, chunk):
    check(make(tokens=tokens, chunk=chunk, value_heads=3 if tokens == 1 else 1, initial=True))


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunks_of_64(tokens):
    # Of these 16-bit inputs only.
    case = make(tokens=tokens, value_heads=1, dtype=torch.float16, initial=True, l2norm=True)
    saved, _ = run(case)
    assert saved.inverse.shape[-1] == 64
    check(case)


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("head_k", "head_v"), [(32, 64), (64, 32), (64, 64), (96, 40), (33, 47), (128, 128), (256, 64)]
)
def test_any_head_sizes(head_k, head_v):
    check(make(tokens=40, chunk=32, value_heads=1, head_k=head_k, head_v=head_v, initial=True, l2norm=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_with_everything_in_the_kernel(dtype, narrow_floats):
    flags = {"l2norm": True, "gate": True, "bias": True, "sigmoid": True, "initial": True}
    check(make(dtype=dtype, gate_dtype=dtype, head_k=64, head_v=64, **flags))


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("batch", "heads", "value_heads", "neg_eigval"), [(1, 1, 3, False), (2, 2, 2, True)])
def test_gates_norms_and_groups(batch, heads, value_heads, neg_eigval):
    flags = {"l2norm": True, "gate": True, "bias": not neg_eigval, "sigmoid": True, "neg_eigval": neg_eigval}
    sizes = {"batch": batch, "heads": heads, "value_heads": value_heads}
    check(make(tokens=20, chunk=16, final=neg_eigval, **sizes, **flags))


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("segment", [None, 16])
def test_packed_documents_have_the_gradients_that_they_have_alone(segment):
    borders = [0, 0, 5, 41, 41, 50]
    flags = {"l2norm": True, "gate": True, "bias": True}
    case = make(tokens=50, chunk=16, value_heads=1, initial=True, borders=borders, segment=segment, **flags)
    _, packed = run(case)
    parts = []
    for number, (begin, end) in enumerate(itertools.pairwise(borders)):
        if begin == end:
            assert torch.equal(packed.initial_state[number], case.dfinal[number])
            continue
        tokenwise = {name: case.tensors[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        initial = case.tensors["initial_state"][number : number + 1]
        alone = dataclasses.replace(
            case,
            tensors={**case.tensors, **tokenwise, "initial_state": initial},
            do=case.do[:, begin:end],
            dfinal=case.dfinal[number : number + 1],
            borders=None,
        )
        _, separate = run(alone)
        parts.append(separate)
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(getattr(packed, name)[:, begin:end], getattr(separate, name)), name
        assert torch.equal(packed.initial_state[number], separate.initial_state[0])
    for name in ("A_log", "dt_bias"):
        torch.testing.assert_close(getattr(packed, name), sum(getattr(each, name) for each in parts))
    for name, each in expected_gradients(case).items():
        # The one element of the other two is a sum over tokens in which most cancels.
        tolerance = 1e-5 if name in {"A_log", "dt_bias"} else 1e-6
        assert relative_rms(getattr(packed, name), each) <= tolerance, name


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eight_segments_are_as_exact_as_one(dtype, narrow_floats):
    sizes = {"tokens": 8 * 16 - 5, "segment": 16, "chunk": 16, "value_heads": 1}
    check(make(dtype=dtype, strongest=-0.1, initial=True, l2norm=True, **sizes))


@pytest.mark.interpreter
@pytest.mark.parametrize("strongest", [-5.0, -50.0])
def test_the_gate_gradient_survives_strong_decay_in_16_bits(strongest):
    found = errors(make(dtype=torch.float16, tokens=80, value_heads=1, strongest=strongest, final=False))
    assert found["g"] <= 1e-3, found


@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 16), (torch.float16, 64)], ids=str)
def test_the_first_token_has_no_gate_gradient_without_an_initial_state(dtype, chunk):
    _, got = run(make(tokens=2 * chunk, dtype=dtype, chunk=chunk, value_heads=1))
    first, others = got.g[:, 0].abs().max(), got.g[:, 1:].square().mean().sqrt()
    assert first <= 1e-5 * others


@pytest.mark.interpreter
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "repeated"])
def test_hard_gates_and_strengths_stay_near_float64(strength, keys):
    case = make(tokens=70, value_heads=1, initial=True, strongest=-50.0 if strength else -0.1)
    case.tensors["beta"].fill_(strength)
    if keys == "repeated":
        case.tensors["k"][:] = case.tensors["k"][:, :1].clone()
    found = errors(case)
    if keys == "repeated" and strength == 1.0:
        # Every token replaces all that was kept, so that gates have next to no effect and hardly a gradient.
        found.pop("g")
    assert max(found.values()) <= 1e-5, found


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_zero_queries_and_keys_with_the_norm(dtype):
    case = make(tokens=40, value_heads=1, l2norm=True, initial=True, dtype=dtype)
    case.tensors["q"][:, 3] = 0
    case.tensors["k"][:, 5:30] = 0
    check(case, factor=10.0)


@pytest.mark.interpreter
def test_everything_at_once_is_decayed_away():
    case = make(tokens=20, chunk=16, value_heads=1, gate=True, bias=True, initial=True)
    case.tensors["A_log"].fill_(12.0)
    _, got = run(case)
    for name in case.tensors:
        assert getattr(got, name).isfinite().all(), name
    assert not got.g.any()


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
def test_any_strides_are_read_and_nothing_outside():
    case = make(tokens=33, chunk=16, l2norm=True, initial=True)
    _, plain = run(case)
    guards = {name: Guarded(case.tensors[name], row_gap=3, margin=65) for name in ("q", "k", "v", "g", "beta")}
    do = Guarded(case.do, column_step=2)
    strided = dataclasses.replace(
        case, tensors={**case.tensors, **{name: each.tensor for name, each in guards.items()}}, do=do.tensor
    )
    _, got = run(strided)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert torch.equal(getattr(got, name), getattr(plain, name)), name
    for guard in (*guards.values(), do):
        guard.check()


@pytest.mark.interpreter
def test_a_transposed_batch_of_many_rows_and_a_missing_dfinal():
    case = make(batch=3, tokens=18, chunk=16, final=False, initial=True)
    for name in ("q", "k", "v"):
        case.tensors[name] = case.tensors[name].transpose(0, 1).contiguous().transpose(0, 1)
    check(case)


@pytest.mark.interpreter
def test_the_same_inputs_give_the_same_bits():
    case = make(tokens=40, l2norm=True)
    saved, first = run(case)
    _, second = run(case, saved=saved)
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.interpreter
def test_launches_and_the_bytes_of_a_token(traffic):
    tokens, heads, value_heads, size = 64, 1, 2, 128
    case = make(
        tokens=tokens, heads=heads, value_heads=value_heads, head_k=size, head_v=size, dtype=torch.float16, l2norm=True
    )
    case.dfinal = None
    saved, _ = run(case)
    del traffic[:]
    run(case, saved=saved)
    assert [launch.name for launch in traffic] == ["gradient_scan_kernel", "chunk_backward_kernel"]
    # One query head of the 16, and its two value heads: a sixteenth of the model that the floor was counted for.
    moved = sum(launch.loads.distinct_bytes + launch.stores.distinct_bytes for launch in traffic) / tokens
    assert moved * 16 <= 2.9 * 41e3


@pytest.fixture
def only_programs(monkeypatch):
    """Maps names of kernels to (first, count): under the interpreter only those programs of a launch run."""
    chosen = {}
    run_grid, firsts = interpreter.GridExecutor.__call__, [0]

    def run_some(executor, *arguments, **options):
        firsts[0], count = chosen[executor.fn.__name__]
        executor.grid = (count,)
        return run_grid(executor, *arguments, **options)

    def program_id(builder, axis):
        number = builder.grid_idx[axis] + (firsts[0] if axis == 0 else 0)
        return interpreter.TensorHandle(np.array([number], dtype=np.int32), interpreter.tl.int32)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_some)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", program_id)
    return chosen


@pytest.mark.interpreter
@pytest.mark.parametrize("before", [1 << 14, (1 << 26) + 16], ids=["1,024 chunks", "offsets beyond 32 bits"])
def test_a_document_behind_many_chunks_has_the_gradients_that_it_has_alone(before, only_programs):
    # Memory of the tokens before is reserved and never touched.
    tokens, chunk = 37, 16
    alone = make(tokens=tokens, chunk=chunk, value_heads=1, head_v=16, dtype=torch.float16, l2norm=True)
    alone = dataclasses.replace(alone, borders=[0, tokens])
    own_chunks = 3
    only_programs |= {
        "chunk_inverse_kernel": (0, own_chunks),
        "scan_kernel": (0, 1),
        "gradient_scan_kernel": (0, 1),
        "chunk_backward_kernel": (0, own_chunks),
    }
    saved, expected = run(alone)

    def behind(values, *, dim=1, gap=before):
        shape = list(values.shape)
        shape[dim] += gap
        whole = torch.empty(shape, dtype=values.dtype)
        whole.narrow(dim, gap, values.shape[dim]).copy_(values)
        return whole

    names = ("q", "k", "v", "g", "beta")
    case = dataclasses.replace(
        alone,
        tensors={**alone.tensors, **{name: behind(alone.tensors[name]) for name in names}},
        do=behind(alone.do),
        dfinal=behind(alone.dfinal, dim=0, gap=1),
        borders=[0, before, before + tokens],
        segment=before + 64,
    )
    saved = dataclasses.replace(
        saved,
        inverse=behind(saved.inverse, dim=2),
        q_rstd=behind(saved.q_rstd),
        k_rstd=behind(saved.k_rstd),
        states=behind(saved.states[:own_chunks], dim=0, gap=before // chunk),
    )
    only_programs |= {"gradient_scan_kernel": (1, 1), "chunk_backward_kernel": (before // chunk, own_chunks)}
    _, got = run(case, saved=saved)
    for name in names:
        assert torch.equal(getattr(got, name)[:, before:], getattr(expected, name)), name


def launch_on_meta(*, batch, tokens, packed=False, dtype=torch.bfloat16, shift=0):
    """A training backward of the usual kind on tensors without data."""

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape[:-1], shape[-1] + shift, dtype=dtype, device="meta")[..., shift:]

    heads, value_heads, size = 1, 2, 32
    chunk = 32 if shift or dtype == torch.float32 else 64
    sequences = 5 if packed else batch
    chunks = tokens // chunk + sequences
    saved = Forward(
        o=empty(batch, tokens, value_heads, size),
        final_state=empty(sequences, value_heads, size, size, dtype=torch.float32),
        inverse=torch.empty(batch, value_heads, tokens, chunk, dtype=dtype, device="meta"),
        q_rstd=torch.empty(batch, tokens, heads, device="meta"),
        k_rstd=torch.empty(batch, tokens, heads, device="meta"),
        states=torch.empty(chunks, value_heads, size, size, dtype=dtype, device="meta"),
    )
    gates = torch.empty(batch, tokens, value_heads, device="meta")
    return gdn_backward_triton(
        empty(batch, tokens, value_heads, size),
        None,
        saved,
        empty(batch, tokens, heads, size),
        empty(batch, tokens, heads, size),
        empty(batch, tokens, value_heads, size),
        gates,
        gates,
        scale=1.0,
        A_log=None,
        dt_bias=None,
        gate=False,
        beta_sigmoid=False,
        neg_eigval=False,
        cu_seqlens=torch.empty(sequences + 1, dtype=torch.int32, device="meta") if packed else None,
        need_initial=False,
        segment=(tokens // 64 + 1) * 64,
    )


def test_any_batch_and_length_share_two_binaries(triton_cache):
    with target_driver("sm_90") as driver:
        for batch, tokens in ((1, 8192), (3, 1), (1, 16), (7, 100_001)):
            launch_on_meta(batch=batch, tokens=tokens)
        assert len(driver.compiled) == 2
        launch_on_meta(batch=1, tokens=8192, packed=True)
        assert len(driver.compiled) == 4
        launch_on_meta(batch=1, tokens=77, packed=True)
        assert len(driver.compiled) == 4


def test_tiles_are_moved_16_bytes_at_a_time(triton_cache):
    with target_driver("sm_90"):
        launch_on_meta(batch=1, tokens=128)
    for name in ("gradient_scan_kernel", "chunk_backward_kernel"):
        (path,) = triton_cache.glob(f"*/{name}.ptx")
        ptx = path.read_text()
        assert re.search(r"(ld|st)\.global\S*\.v4\.b32", ptx)
        # One element at a time are moved only the fp32 numbers of a token.
        assert not re.search(r"(ld|st)\.global\S*\.b16", ptx)
