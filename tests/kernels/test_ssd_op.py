"""`mamba_chunk_scan_combined` as its callers see it: results, gradients, errors, and its manners under PyTorch."""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from automodel_kernels import mamba_chunk_scan_combined
from automodel_kernels.ssd.operators import ssd, ssd_backward
from automodel_kernels.ssd.reference import mamba_chunk_scan_combined_reference
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.accuracy import relative_rms

FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
# Of an fp32 result against the recurrence in float64.
BOUNDS = {"A": 5e-6}
BOUND = 1.5e-6


def made(*, batch=2, seqlen=70, heads=4, head_dim=16, groups=2, state=16, dtype=torch.float32, seed=0, **changes):
    """Every argument of the operator, with small sizes; `changes` replace some."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    arguments = {
        "x": normal(batch, seqlen, heads, head_dim).to(dtype),
        "dt": normal(batch, seqlen, heads).to(dtype),
        "A": -torch.linspace(1, 8, heads),
        "B": normal(batch, seqlen, groups, state).to(dtype),
        "C": normal(batch, seqlen, groups, state).to(dtype),
        "chunk_size": 64,
        "D": normal(heads),
        "z": normal(batch, seqlen, heads, head_dim).to(dtype),
        "dt_bias": normal(heads) - 2,
        "initial_states": normal(batch, heads, head_dim, state),
        "dt_softplus": True,
        "dt_limit": (0.001, 0.5),
        "return_final_states": True,
    }
    return arguments | changes


def with_gradients(function, arguments):
    """Outputs and gradients by name; the loss weighs every output at random."""
    arguments = dict(arguments)
    names = [name for name in FLOATING if arguments[name] is not None]
    for name in names:
        arguments[name] = arguments[name].detach().clone().requires_grad_()
    outputs = function(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs]
    gradients = torch.autograd.grad(outputs, [arguments[name] for name in names], weights)
    found = {f"output {number}": each.detach() for number, each in enumerate(outputs)}
    return found | dict(zip(names, gradients, strict=True))


def wide(arguments):
    return {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in arguments.items()
    }


def check_against_reference(arguments):
    found = with_gradients(mamba_chunk_scan_combined, arguments)
    expected = with_gradients(mamba_chunk_scan_combined_reference, wide(arguments))
    errors = {name: relative_rms(found[name], each) for name, each in expected.items()}
    assert {name: error for name, error in errors.items() if error > BOUNDS.get(name, BOUND)} == {}


PACKED = torch.tensor([[0] * 3 + [1] * 40 + [0] * 27, [5] * 64 + [7] * 6], dtype=torch.int64)
CASES = {
    "everything": {},
    "least": dict.fromkeys(("D", "z", "dt_bias", "initial_states")) | {"dt_softplus": False},
    "D per channel": {"D": torch.arange(64.0).view(4, 16) / 64},
    "seq_idx": {"seq_idx": PACKED},
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_on_the_cpu_are_those_of_the_recurrence(case):
    check_against_reference(made(**CASES[case]))


SMALL = {"batch": 1, "heads": 2, "groups": 1}
SMALL_CASES = {
    "everything": {},
    "least": CASES["least"],
    "D per channel and seq_idx": {"D": torch.arange(32.0).view(2, 16) / 32, "seq_idx": PACKED[:1]},
}


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", SMALL_CASES)
def test_results_and_gradients_of_the_kernels_are_those_of_the_recurrence(case):
    check_against_reference(made(**SMALL, **SMALL_CASES[case]))


def documents():
    arguments = made(**SMALL, seqlen=75, initial_states=torch.randn(4, 2, 16, 16))
    return arguments | {"cu_seqlens": torch.tensor([0, 30, 30, 31, 75]), "return_varlen_states": True}


def each_document_alone(**arguments):
    """What the packed call should return, from one call per document."""
    bounds = arguments.pop("cu_seqlens").tolist()
    del arguments["return_varlen_states"]
    outs, states = [], []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: arguments[name][:, begin:end] for name in ("x", "dt", "B", "C", "z")}
        initial = arguments["initial_states"][number : number + 1]
        out, state = mamba_chunk_scan_combined(**arguments | part | {"initial_states": initial})
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), states[-1], torch.cat(states)


def check_documents():
    arguments = documents()
    found = with_gradients(mamba_chunk_scan_combined, arguments)
    expected = with_gradients(each_document_alone, arguments)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=2e-5, atol=2e-5)


def test_documents_of_cu_seqlens_on_the_cpu_are_as_if_alone():
    check_documents()


@pytest.mark.interpreter
@pytest.mark.usefixtures("poison")
def test_documents_of_cu_seqlens_in_the_kernels_are_as_if_alone():
    check_documents()


@pytest.mark.interpreter
def test_two_runs_of_the_kernels_have_the_same_bits():
    arguments = made(**SMALL, seq_idx=PACKED[:1])
    first, second = (with_gradients(mamba_chunk_scan_combined, arguments) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("seqlen", [0, 1])
def test_few_tokens(seqlen):
    arguments = made(seqlen=seqlen)
    out, state = mamba_chunk_scan_combined(**arguments)
    expected, expected_state = mamba_chunk_scan_combined_reference(**wide(arguments))
    assert out.shape == arguments["x"].shape
    assert relative_rms(out, expected) < BOUND
    assert relative_rms(state, expected_state) < BOUND


def test_no_tokens_have_gradients_of_zero_and_pass_the_states():
    found = with_gradients(mamba_chunk_scan_combined, made(seqlen=0))
    assert found["x"].shape == (2, 0, 4, 16)
    assert torch.equal(found["A"], torch.zeros(4))
    assert found["initial_states"].abs().min() > 0


def test_what_is_returned():
    arguments = documents()
    out = arguments | {"return_final_states": False, "return_varlen_states": False}
    assert isinstance(mamba_chunk_scan_combined(**out), torch.Tensor)
    both = mamba_chunk_scan_combined(**arguments)
    assert [each.shape[0] for each in both] == [1, 1, 4]
    assert len(mamba_chunk_scan_combined(**out | {"return_final_states": True})) == 2
    assert torch.equal(both[1], both[2][-1:])
    assert both[2].dtype == torch.float32


def strided(arguments):
    """The same values as views into wider tensors, with heads before tokens in x."""
    x, b = arguments["x"], arguments["B"]
    wider = torch.zeros(*b.shape[:3], b.shape[3] + 3)
    wider[..., 1:-2] = b
    return arguments | {"x": x.transpose(1, 2).contiguous().transpose(1, 2), "B": wider[..., 1:-2]}


def check_strides():
    arguments = made(**SMALL)
    for found, each in zip(
        mamba_chunk_scan_combined(**strided(arguments)), mamba_chunk_scan_combined(**arguments), strict=True
    ):
        torch.testing.assert_close(found, each, rtol=1e-6, atol=1e-6)


def test_strided_views_on_the_cpu():
    check_strides()


@pytest.mark.interpreter
def test_strided_views_in_the_kernels():
    check_strides()


# --- as a part of PyTorch --------------------------------------------------------------------------------------------


def operands(arguments, *, save=True):
    least, greatest = arguments["dt_limit"]
    tensors = [arguments[name] for name in FLOATING]
    ids, bounds = arguments.get("seq_idx"), arguments.get("cu_seqlens")
    ids, bounds = (None if each is None else each.to(torch.int32) for each in (ids, bounds))
    return (*tensors, ids, bounds, arguments["dt_softplus"], least, greatest, True, save)


def check_opcheck(arguments):
    for name in FLOATING:
        if arguments[name] is not None:
            arguments[name].requires_grad_()
    torch.library.opcheck(ssd, operands(arguments))
    with torch.no_grad():
        out, states, saved = ssd(*operands(arguments))
        inputs = operands(arguments)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ssd_backward, (out, states, saved, *inputs[:-2]), test_utils=tests)


@pytest.mark.parametrize("case", CASES)
def test_opcheck_on_the_cpu(case):
    check_opcheck(made(**CASES[case]))


@pytest.mark.interpreter
def test_opcheck_of_the_kernels():
    check_opcheck(made(**SMALL, seqlen=5, seq_idx=torch.tensor([[0, 0, 1, 1, 1]])))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 4 * 16 + 2 * 16 + 4, bias=False)
        self.A_log = torch.nn.Parameter(torch.linspace(0, 2, 4))
        self.D = torch.nn.Parameter(torch.ones(4))
        self.dt_bias = torch.nn.Parameter(torch.full((4,), -2.0))

    def forward(self, hidden):
        x, b, c, dt = self.projection(hidden).split([64, 16, 16, 4], dim=-1)
        out = mamba_chunk_scan_combined(
            x.unflatten(-1, (4, 16)),
            dt,
            -self.A_log.exp(),
            b.unsqueeze(2),
            c.unsqueeze(2),
            64,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return out.flatten(2)


def layer_gradients(call, layer, hidden):
    layer.zero_grad()
    hidden = hidden.clone().requires_grad_()
    out = call(hidden)
    out.float().square().sum().backward()
    return [out.detach(), hidden.grad, *(each.grad.clone() for each in layer.parameters())]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Layer()


@pytest.fixture
def hidden():
    return torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(2))


def test_a_module_compiles_without_a_break(layer, hidden):
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (40, 25):
        for found, each in zip(
            layer_gradients(compiled, layer, hidden[:, :tokens]),
            layer_gradients(layer, layer, hidden[:, :tokens]),
            strict=True,
        ):
            torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)


def test_activation_checkpointing_has_the_same_bits(layer, hidden):
    plain = layer_gradients(layer, layer, hidden)
    again = layer_gradients(lambda each: checkpoint(layer, each, use_reentrant=False), layer, hidden)
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_mixes_data_types(layer, hidden, dtype):
    with torch.autocast("cpu", dtype=dtype):
        mixed = layer_gradients(layer, layer, hidden)
    assert mixed[0].dtype == dtype
    assert {each.dtype for each in mixed[1:]} == {torch.float32}
    for found, each in zip(mixed, layer_gradients(layer, layer, hidden), strict=True):
        assert relative_rms(found.float(), each) < 3e-2


def test_other_data_types_beside_x_are_taken():
    arguments = made(dtype=torch.bfloat16, D=torch.ones(4, dtype=torch.bfloat16))
    arguments["C"] = arguments["C"].float()
    found = with_gradients(mamba_chunk_scan_combined, arguments)
    assert found["output 0"].dtype == torch.bfloat16
    assert all(found[name].dtype == arguments[name].dtype for name in FLOATING)


def test_a_second_derivative_is_refused():
    arguments = made()
    x = arguments["x"].requires_grad_()
    out, _ = mamba_chunk_scan_combined(**arguments)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="mamba_chunk_scan_combined has first derivatives only"):
        gradient.sum().backward()


# --- launches --------------------------------------------------------------------------------------------------------


def launched(driver, arguments):
    """Launches of a forward and of a backward."""
    arguments = dict(arguments)
    for name in FLOATING:
        if arguments[name] is not None:
            arguments[name] = arguments[name].detach().requires_grad_()
    before = len(driver.launches)
    outputs = mamba_chunk_scan_combined(**arguments)
    between = len(driver.launches)
    torch.autograd.grad(outputs[0].sum(), arguments["x"])
    return between - before, len(driver.launches) - between


def sized(batch, seqlen, **changes):
    return made(batch=batch, seqlen=seqlen, head_dim=64, state=128, groups=1, dtype=torch.bfloat16, **changes)


def test_the_number_of_launches(triton_cache):
    with target_driver("sm_90") as driver:
        assert launched(driver, sized(1, 300, z=None)) == (3, 5)
        assert launched(driver, sized(1, 300)) == (3, 6)


def test_a_warm_call_compiles_nothing_for_other_sizes_and_strides(triton_cache):
    with target_driver("sm_90") as driver:
        launched(driver, sized(1, 128))
        assert len(driver.compiled) <= 12
        warm = len(driver.binaries)
        for batch, seqlen in ((1, 1), (3, 77), (2, 2048)):
            launched(driver, sized(batch, seqlen))
        wider = sized(1, 130)
        wider["x"] = torch.zeros(1, 130, 8, 64, dtype=torch.bfloat16)[:, :, 4:]
        launched(driver, wider)
        assert len(driver.binaries) == warm
        assert driver.measured == 0


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 70, 4)}, r"x must be \[batch, seqlen, heads, head_dim\], got the shape \(2, 70, 4\)"),
        ({"dt": torch.zeros(2, 70, 3)}, r"dt must have the shape \(2, 70, 4\), got \(2, 70, 3\)"),
        ({"A": torch.zeros(3)}, r"A must have the shape \(4,\), got \(3,\)"),
        ({"B": torch.zeros(2, 70, 3, 16)}, "B must have a number of groups that divides the 4 heads of x, got 3"),
        ({"B": torch.zeros(2, 69, 2, 16)}, r"B must be \[2, 70, groups, state\], got the shape \(2, 69, 2, 16\)"),
        ({"C": torch.zeros(2, 70, 1, 16)}, r"C must have the shape \(2, 70, 2, 16\), got \(2, 70, 1, 16\)"),
        ({"D": torch.zeros(4, 17)}, r"D must have the shape \(4, 16\), got \(4, 17\)"),
        ({"z": torch.zeros(2, 70, 4, 8)}, r"z must have the shape \(2, 70, 4, 16\), got \(2, 70, 4, 8\)"),
        ({"dt_bias": torch.zeros(1)}, r"dt_bias must have the shape \(4,\), got \(1,\)"),
        ({"initial_states": torch.zeros(3, 4, 16, 16)}, r"initial_states must have the shape \(2, 4, 16, 16\), got"),
        ({"seq_idx": torch.zeros(2, 69, dtype=torch.int32)}, r"seq_idx must have the shape \(2, 70\), got \(2, 69\)"),
        ({"seq_idx": torch.zeros(2, 70)}, "seq_idx must be integers, got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 70])}, "x must have a batch of 1 with cu_seqlens, got 2"),
        ({"return_varlen_states": True}, "return_varlen_states needs cu_seqlens, got None"),
        ({"chunk_size": 0}, "chunk_size must be positive, got 0"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit must be two numbers, 0 <= least <= greatest, got \(1.0, 0.5\)"),
        ({"dt_limit": (math.nan, 0.5)}, "dt_limit must be two numbers"),
        ({"x": torch.zeros(2, 70, 4, 16, dtype=torch.int32)}, "x must be floating-point, got torch.int32"),
        ({"A": torch.zeros(4, device="meta")}, "A must be on x's device cpu, got meta"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        mamba_chunk_scan_combined(**made(**changes))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 40, 30, 75], r"cu_seqlens must run from 0 to the 75 tokens of x and not decrease, got \[0, 40, 30, 75\]"),
        ([0, 40], "cu_seqlens must run from 0 to the 75 tokens"),
        ([1, 75], "cu_seqlens must run from 0 to the 75 tokens"),
        ([0], r"cu_seqlens must be \[documents \+ 1\], got the shape \(1,\)"),
    ],
)
def test_wrong_bounds_are_named(bounds, message):
    arguments = made(batch=1, seqlen=75, initial_states=None, cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match=message):
        mamba_chunk_scan_combined(**arguments)


def test_sizes_that_the_kernels_do_not_have_are_named():
    with target_driver("sm_90"):
        for changes, message in (
            ({"head_dim": 24}, "x must have a head_dim of 16, 32, 64, 128 on a GPU, got 24"),
            ({"state": 300}, "B must have a state of 1 to 256 on a GPU, got 300"),
            ({"dtype": torch.float64}, "x must be one of .* on a GPU, got torch.float64"),
        ):
            with pytest.raises(ValueError, match=message):
                mamba_chunk_scan_combined(**made(**changes))
