"""The Gated DeltaNet forward kernels: under the interpreter against the recurrence in float64, and as they compile."""

import dataclasses
import itertools
import math

import pytest
import torch

from automodel_kernels.gdn import scan
from automodel_kernels.gdn.chunk_inverse import chunk_inverse
from automodel_kernels.gdn.forward import gdn_forward_triton
from automodel_kernels.gdn.reference import chunk_gated_delta_rule_reference
from automodel_kernels.gdn.tiles import Spans, choose_chunk
from automodel_kernels.hardware import TARGETS
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.accuracy import relative_rms

interpreted = pytest.mark.interpreter
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
OPTIONS = ("l2norm", "gate", "beta_sigmoid", "neg_eigval")


def make(tokens, *, batch=1, heads=1, group=1, head_k=32, head_v=16, dtype=torch.float32, strongest=-5.0, seed=0):
    """Inputs with keys of length 1, g in [strongest, 0] and beta in [0, 1]; few columns of V, for tests are slow."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k = normal(batch, tokens, heads, head_k), normal(batch, tokens, heads, head_k)
    v = normal(batch, tokens, heads * group, head_v)
    g, beta = (torch.rand(batch, tokens, heads * group, generator=generator) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": strongest * g, "beta": beta}


def state_for(inputs, *, sequences=None, dtype=torch.float32, seed=1):
    batch, _, value_heads, head_v = inputs["v"].shape
    shape = (sequences or batch, value_heads, inputs["q"].shape[-1], head_v)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(inputs, *, initial=None, borders=None, chunk=64, segment=None, save=False, A_log=None, dt_bias=None, **on):
    return gdn_forward_triton(
        **inputs,
        scale=inputs["q"].shape[-1] ** -0.5,
        initial_state=initial,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=None if borders is None else torch.tensor(borders, dtype=torch.int32),
        chunk_size=chunk,
        segment=segment,
        save=save,
        **{name: on.get(name, False) for name in OPTIONS},
    )


def reference(inputs, *, initial=None, borders=None, A_log=None, dt_bias=None, **on):
    wide = {name: each.double() for name, each in inputs.items()}
    return chunk_gated_delta_rule_reference(
        **wide,
        initial_state=None if initial is None else initial.double(),
        output_final_state=True,
        cu_seqlens=None if borders is None else torch.tensor(borders),
        use_qk_l2norm_in_kernel=on.get("l2norm", False),
        use_gate_in_kernel=on.get("gate", False),
        A_log=None if A_log is None else A_log.double(),
        dt_bias=None if dt_bias is None else dt_bias.double(),
        use_beta_sigmoid_in_kernel=on.get("beta_sigmoid", False),
        allow_neg_eigval=on.get("neg_eigval", False),
    )


def check(inputs, *, factor=1.0, chunk=64, segment=None, save=False, **options):
    found = forward(inputs, chunk=chunk, segment=segment, save=save, **options)
    o, final = reference(inputs, **options)
    tolerance = TOLERANCE[inputs["q"].dtype] * factor
    assert found.o.dtype == inputs["v"].dtype
    assert found.final_state.dtype == torch.float32
    assert relative_rms(found.o, o) <= tolerance
    assert relative_rms(found.final_state, final) <= tolerance
    return found


def part(inputs, begin, end):
    return {name: each[:, begin:end].contiguous() for name, each in inputs.items()}


SHAPES = [
    # tokens, chunk, batch, heads, group, head_k, head_v
    (1, 64, 2, 1, 1, 32, 32),
    (15, 16, 1, 1, 3, 32, 64),
    (17, 16, 1, 2, 2, 64, 32),
    (33, 32, 1, 1, 1, 128, 96),
    (63, 64, 1, 1, 1, 96, 40),
    (64, 64, 1, 1, 1, 64, 128),
    (65, 64, 2, 1, 1, 32, 32),
    (5, 64, 1, 1, 1, 256, 256),
    (5, 16, 1, 1, 1, 100, 36),
]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_shape_matches_float64(shape):
    tokens, chunk, batch, heads, group, head_k, head_v = shape
    inputs = make(tokens, batch=batch, heads=heads, group=group, head_k=head_k, head_v=head_v)
    check(inputs, initial=state_for(inputs), chunk=chunk)


@interpreted
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_match_float64(dtype, l2norm):
    inputs = make(200 if l2norm else 65, head_k=64, dtype=dtype)
    found = check(inputs, initial=state_for(inputs), l2norm=l2norm, chunk=64)
    assert found.inverse.shape[-1] == 64


@interpreted
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize(("dtype", "bias"), [*((each, True) for each in TOLERANCE), (torch.float32, False)], ids=str)
def test_norm_gate_and_sigmoid_in_the_kernels(dtype, bias):
    inputs = make(17, group=2, dtype=dtype)
    inputs["q"] *= 3
    inputs["k"] *= 0.2
    inputs["g"], inputs["beta"] = inputs["g"] + 2.5, 4 * inputs["beta"] - 2
    check(
        inputs,
        chunk=16,
        A_log=torch.tensor([-1.0, 0.5]),
        dt_bias=torch.tensor([-9.0, 30.0]) if bias else None,
        **dict.fromkeys(OPTIONS, True),
    )
    # Without doubling, and with gates in the activations' dtype.
    inputs["g"], inputs["beta"] = inputs["g"].to(dtype), inputs["beta"].to(dtype)
    check(inputs, chunk=32, beta_sigmoid=True, gate=True, A_log=torch.zeros(2), l2norm=True)


@interpreted
def test_a_document_has_the_bits_that_it_has_alone():
    # In segments of 64 tokens, which split the last one.
    segment = 64
    borders = [0, 0, 17, 18, 18, 18 + 70, 18 + 70]
    inputs = make(18 + 70)
    initial = state_for(inputs, sequences=len(borders) - 1)
    packed = check(inputs, borders=borders, initial=initial, chunk=32, segment=segment, save=True)
    chunks = 0
    for number, (begin, end) in enumerate(itertools.pairwise(borders)):
        first = initial[number : number + 1]
        if begin == end:
            assert torch.equal(packed.final_state[number], first[0])
            continue
        alone = forward(part(inputs, begin, end), initial=first, chunk=32, segment=segment, save=True)
        assert torch.equal(alone.o, packed.o[:, begin:end])
        assert torch.equal(alone.final_state[0], packed.final_state[number])
        assert torch.equal(alone.inverse, packed.inverse[:, :, begin:end])
        assert torch.equal(alone.states, packed.states[chunks : chunks + len(alone.states)])
        chunks += len(alone.states)
    assert chunks <= len(packed.states)


@interpreted
def test_documents_without_initial_states_start_from_zero():
    inputs = make(20)
    packed = check(inputs, borders=[0, 0, 9, 20], chunk=16)
    assert torch.equal(packed.final_state[0], torch.zeros(1, 32, 16))


@interpreted
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eight_segments_are_as_exact_as_one(dtype):
    # Weak decay: what the first segment leaves reaches the last.
    inputs = make(8 * 64 - 5, dtype=dtype, strongest=-0.02)
    check(inputs, initial=state_for(inputs), segment=64, l2norm=True)


@interpreted
def test_segments_of_large_heads():
    inputs = make(70, head_k=256, dtype=torch.float16, strongest=-0.02)
    check(inputs, initial=state_for(inputs), segment=64)


@interpreted
def test_segments_of_a_batch_with_a_norm_and_a_gate():
    inputs = make(130, batch=2, strongest=-1.0)
    options = {"l2norm": True, "gate": True, "beta_sigmoid": True, "A_log": torch.tensor([-3.0])}
    split = check(inputs, initial=state_for(inputs), chunk=32, segment=64, save=True, **options)
    whole = forward(inputs, initial=state_for(inputs), chunk=32, save=True, **options)
    assert relative_rms(split.states, whole.states) <= 1e-6
    assert torch.equal(split.inverse, whole.inverse)


@interpreted
def test_the_states_at_the_chunks_starts_are_kept():
    inputs = make(40)
    initial = state_for(inputs)
    states = forward(inputs, initial=initial, chunk=16, save=True).states
    assert torch.equal(states[0], initial[0])
    for number in (1, 2):
        _, expected = reference(part(inputs, 0, 16 * number), initial=initial)
        assert relative_rms(states[number], expected[0]) <= 1e-6
    assert forward(inputs, initial=initial, chunk=16).states is None


@interpreted
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_inverse_is_exact_to_rounding(chunk, keys, beta):
    inputs = make(chunk, strongest=-0.1)
    if keys == "equal":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"].fill_(beta)
    options = {"A_log": None, "dt_bias": None, "cu_seqlens": None, "l2norm": False}
    options |= {"beta_sigmoid": False, "neg_eigval": False, "aligned": True}
    spans = Spans.of(inputs.pop("v"), None, chunk=chunk)
    found = chunk_inverse(**inputs, spans=spans, **options)[0][0, 0]
    k, gates = inputs["k"][0, :, 0].double(), inputs["g"][0, :, 0].double().cumsum(0)
    system = (beta * (gates[:, None] - gates[None, :]).exp() * (k @ k.t())).tril(-1) + torch.eye(chunk).double()
    exact = torch.linalg.inv(system)
    # What rounding the system to fp32 costs any method; more with equal keys and beta 2.
    rounded = torch.linalg.solve_triangular(system.float(), torch.eye(chunk), upper=False)
    assert relative_rms(found, exact) <= 4e-7 + 4 * relative_rms(rounded, exact)
    assert torch.equal(found.triu(1), torch.zeros(chunk, chunk))


@interpreted
def test_norms_of_queries_and_keys():
    inputs = make(20, heads=2, head_k=96)
    inputs["k"][0, 3] = 0
    found = forward(inputs, chunk=16, l2norm=True)
    for name, rstd in (("q", found.q_rstd), ("k", found.k_rstd)):
        expected = inputs[name].double().square().sum(-1).add(1e-6).rsqrt()
        assert relative_rms(rstd, expected) <= 1e-6
    assert forward(inputs, chunk=16).q_rstd is None


@interpreted
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize(
    ("dtype", "strongest"), [*((each, -50.0) for each in TOLERANCE), (torch.float32, -1000.0)], ids=str
)
def test_strong_decay_keeps_the_digits_of_weak_gates(dtype, strongest):
    inputs = make(64, dtype=dtype, strongest=-0.1)
    inputs["g"][:, 5::9] = strongest
    check(inputs, initial=state_for(inputs), l2norm=True, factor=1.0 if dtype == torch.float32 else 2.0)


@interpreted
def test_a_gate_of_minus_infinity_forgets_everything():
    inputs = make(40, strongest=-0.5)
    inputs["g"][:, 20] = -math.inf
    found = forward(inputs, initial=state_for(inputs), chunk=32)
    alone = forward(part(inputs, 20, 40), chunk=32)
    assert found.o.isfinite().all()
    assert relative_rms(found.o[:, 20:], alone.o) <= 1e-6


@interpreted
@pytest.mark.usefixtures("narrow_floats")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("keys", "beta"), [("equal", 0.0), ("equal", 1.0), ("equal", 2.0), ("zero", 2.0)])
def test_extreme_betas_and_keys(dtype, beta, keys):
    inputs = make(33, dtype=dtype, strongest=-1.0)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous() * (keys == "equal")
    inputs["beta"].fill_(beta)
    check(inputs, initial=state_for(inputs), chunk=32, l2norm=True, factor=10.0)


@interpreted
def test_tiny_keys_do_not_overflow_float16():
    inputs = make(16, dtype=torch.float16)
    inputs["k"] = inputs["k"] * (torch.arange(16) % 2)[None, :, None, None]
    inputs["v"] *= 300
    assert forward(inputs, chunk=16, l2norm=True).o.isfinite().all()


@interpreted
def test_a_nan_is_not_hidden():
    for name in ("q", "k", "v", "g", "beta"):
        inputs = make(32)
        inputs[name].select(1, 20).fill_(math.nan)
        o = forward(inputs, chunk=16).o
        assert o[:, 20].isnan().any(), name
        assert not o[:, :16].isnan().any(), name


def spread(values, *, step, shift):
    """The values with a stride along the last dimension and a shifted address, in a buffer of NaN."""
    base = torch.full((values.numel() * step + shift,), math.nan, dtype=values.dtype)
    strides = [stride * step for stride in values.contiguous().stride()]
    return base.as_strided(values.shape, strides, shift).copy_(values)


def heads_first(values):
    return values.transpose(1, 2).contiguous().transpose(1, 2)


@interpreted
@pytest.mark.parametrize(
    "layout",
    [lambda x: spread(x, step=1, shift=1), lambda x: spread(x, step=3, shift=0), heads_first],
    ids=["shifted", "stepped", "heads first"],
)
def test_layouts_do_not_change_a_bit(layout):
    inputs = make(17, batch=2, heads=2)
    initial = state_for(inputs)
    expected = forward(inputs, initial=initial, chunk=32, l2norm=True, save=True)
    found = forward(
        {name: layout(each) for name, each in inputs.items()},
        initial=layout(initial),
        chunk=32,
        l2norm=True,
        save=True,
    )
    for name, each in vars(expected).items():
        assert torch.equal(getattr(found, name), each), name


@interpreted
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("segment", [None, 64])
def test_everything_is_written_before_it_is_read(segment):
    inputs = make(140, dtype=torch.float16)
    found = check(inputs, segment=segment, chunk=64, l2norm=True, save=True)
    assert all(each.isfinite().all() for each in vars(found).values())
    check(inputs, borders=[0, 70, 70, 140], segment=segment, chunk=64, l2norm=True, save=True)


@interpreted
def test_offsets_beyond_32_bits_reach_their_tokens():
    # Four gigabytes that are reserved and hardly touched.
    stride = 1 << 27
    base = torch.empty(16 * stride + (1 << 12), dtype=torch.float16)
    inputs = make(17, dtype=torch.float16)
    far = {}
    for number, (name, values) in enumerate(inputs.items()):
        strides = (0, stride, 64, 1)[: values.ndim]
        far[name] = base.as_strided(values.shape, strides, number * 128).copy_(values)
    near = {name: each.clone().contiguous() for name, each in far.items()}
    assert torch.equal(forward(far, chunk=16).o, forward(near, chunk=16).o)


@interpreted
@pytest.mark.usefixtures("narrow_floats")
def test_bytes_a_token_are_near_the_least(traffic):
    tokens, group, dim = 128, 2, 128
    inputs = make(tokens, group=group, head_k=dim, head_v=dim, dtype=torch.bfloat16)
    # q, k, v and o once, g and beta in fp32.
    floor = tokens * (2 * (2 * dim + 2 * group * dim) + 8 * group)
    for save, most in ((False, 1.7), (True, 2.4)):
        traffic.clear()
        forward(inputs, l2norm=True, save=save)
        assert [launch.name for launch in traffic] == ["chunk_inverse_kernel", "scan_kernel"]
        # The final state is written once a sequence, however long it is.
        moved = sum(each.loads.distinct_bytes + each.stores.distinct_bytes for each in traffic)
        moved -= 4 * group * dim * dim
        assert moved <= most * floor


def test_heads_or_else_segments_fill_a_gpu():
    def spans(tokens, heads, *, batch=1, cu_seqlens=None):
        return Spans.of(torch.empty(batch, tokens, heads, 128, device="meta"), cu_seqlens, chunk=64)

    assert not spans(8192, 32).split
    assert not spans(1000, 8).split
    assert not spans(65_536, 8, batch=4).split
    assert spans(65_536, 8) == dataclasses.replace(spans(65_536, 8), segment=8192, num_segments=8, num_chunks=1024)
    assert spans(8192, 2).num_segments == 16
    assert spans(8192, 2, cu_seqlens=torch.tensor([0, 100, 8192])).num_segments == 8192 // 512 + 2
    for tokens in range(1, 6000, 61):
        each = spans(tokens, 1)
        assert each.segment % 64 == 0
        assert each.split == (each.num_segments > 1)


@pytest.mark.parametrize(("target", "largest"), [("sm_80", 32), ("sm_89", 32), ("sm_90", 64), ("gfx942", 64)])
def test_the_chunk_suits_the_gpu_and_the_caller(target, largest):
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="meta")
    with target_driver(target):
        assert choose_chunk(q, chunk_size=256) == largest
        assert choose_chunk(q.float(), chunk_size=64) == 32
        assert choose_chunk(q.repeat(1, 1, 1, 2), chunk_size=64) == 32
        assert choose_chunk(q, chunk_size=48) == 32
        assert choose_chunk(q, chunk_size=16) == 16


def test_batch_length_and_strides_share_binaries(triton_cache):
    def run(batch, tokens, *, heads=2, value_heads=64, borders=None, gap=0):
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape[:-1], shape[-1] + gap, dtype=dtype, device="meta")[..., : shape[-1]]

        inputs = {"q": empty(batch, tokens, heads, 32), "k": empty(batch, tokens, heads, 32)}
        inputs["v"] = empty(batch, tokens, value_heads, 32)
        inputs |= {name: empty(batch, tokens, value_heads, dtype=torch.float32) for name in ("g", "beta")}
        forward(inputs, borders=borders, chunk=16, l2norm=True, save=True)

    with target_driver("sm_90") as driver:
        run(2, 64)
        assert len(driver.compiled) == 2
        for batch, tokens, gap in ((2, 1, 0), (5, 100, 0), (2, 100_000, 64), (4, 16, 8)):
            run(batch, tokens, gap=gap)
        assert len(driver.compiled) == 2
        # Few heads and many tokens: the maps are the only new kernel.
        run(1, 8192, value_heads=2)
        assert len(driver.compiled) == 3
        assert [launch.name for launch in driver.launches[-3:]] == [
            "chunk_inverse_kernel",
            "segment_maps_kernel",
            "scan_kernel",
        ]
        run(1, 1000, value_heads=128, borders=[0, 3, 1000])
        assert len(driver.compiled) == 5


@pytest.mark.parametrize("aligned", [True, False])
def test_aligned_tiles_move_16_bytes_at_a_time(triton_cache, aligned):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    with target_driver("sm_90"):
        kernel = scan.scan_kernel
        tensors = {name: empty(1) for name in kernel.fn.arg_names if name.endswith("_ptr")}
        tensors |= {name: each.float() for name, each in tensors.items() if name in {"g_ptr", "beta_ptr", "final_ptr"}}
        tensors |= {name: empty(1, dtype=torch.float32) for name in ("q_rstd_ptr", "k_rstd_ptr", "offsets_ptr")}
        flags = dict.fromkeys(("HAS_GATE", "HAS_GATE_BIAS", "BETA_SIGMOID", "NEG_EIGVAL", "HAS_INITIAL"), False)
        flags |= {"HEAD_K": 64, "HEAD_V": 64, "BLOCK_K": 64, "CHUNK": 16, "L2NORM": True, "SAVE": True}
        flags |= {"VARLEN": False, "ALIGNED": aligned}
        config = spaces.GDN_SCAN.get(TARGETS["sm_90"], dtype=torch.bfloat16, flags=flags).configs[0]
        given = tensors | flags | config.options
        sizes = dict.fromkeys((name for name in kernel.fn.arg_names if name not in given), 64)
        binary = kernel.fn.run(grid=(1,), warmup=True, **given, **sizes | {"scale": 0.1})
    lines = [line for line in binary.asm["ptx"].splitlines() if "global" in line]
    wide = [line for line in lines if ".v4.b32" in line or ("cp.async" in line and "0x10" in line)]
    narrow = [line for line in lines if ".b16" in line or ".u16" in line]
    assert wide
    # What is not ours is read in pieces where it is not aligned.
    assert bool(narrow) != aligned
