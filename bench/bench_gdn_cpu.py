"""The gated delta rule on a CPU, forward and backward, beside transformers' chunked fallback with autograd.

Both run in turns in one process, in CPU seconds; the aim is 1.5 times faster. Decoding is beside transformers'
recurrent fallback, one token at a time.
"""

import inspect
import statistics
import time

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from automodel_kernels.gdn.chunked import gdn_backward_torch, gdn_forward_torch
from automodel_kernels.gdn.recurrent import fused_recurrent_gated_delta_rule

AIM = 1.5
ROUNDS = 9
# batch, tokens, heads, value heads, key_dim, value_dim; the first one is the aim's.
SHAPES = {
    "2x512 H4 HV8 K64 V64": (2, 512, 4, 8, 64, 64),
    "1x2048 H4 HV8 K128 V128": (1, 2048, 4, 8, 128, 128),
    "4x128 H2 HV2 K32 V32": (4, 128, 2, 2, 32, 32),
}
their_chunks = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
their_steps = inspect.unwrap(modeling_qwen3_next.torch_recurrent_gated_delta_rule)


@pytest.fixture(params=[1, 2])
def threads(request):
    former = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(former)


def make(batch, tokens, heads, value_heads, key_dim, value_dim):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, tokens, heads, key_dim, generator=generator) for _ in range(2))
    v = torch.randn(batch, tokens, value_heads, value_dim, generator=generator)
    g = -torch.rand(batch, tokens, value_heads, generator=generator)
    return q, k, v, g, torch.rand(batch, tokens, value_heads, generator=generator)


def alternate(*calls):
    """The median CPU seconds of each call, in turns."""
    taken = [[] for _ in calls]
    for number in range(ROUNDS + 2):
        for call, times in zip(calls, taken, strict=True):
            started = time.process_time()
            call()
            if number >= 2:
                times.append(time.process_time() - started)
    return [statistics.median(times) for times in taken]


def report(benchmark, name, call, *, ours, theirs, threads, **more):
    results = {
        "device": "cpu",
        "path": "torch",
        "threads": threads,
        "our CPU ms": round(ours * 1e3, 2),
        "transformers' CPU ms": round(theirs * 1e3, 2),
        "times faster": round(theirs / ours, 2),
        **more,
    }
    benchmark.extra_info.update(results)
    print(name, results)
    benchmark.pedantic(call, rounds=1)


@pytest.mark.benchmark(group="gated delta rule, forward and backward")
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(benchmark, threads, shape):
    inputs = make(*SHAPES[shape])
    leaves = [each.clone().requires_grad_() for each in inputs]
    do = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1))
    key_dim = inputs[0].shape[3]
    options = {"scale": key_dim**-0.5, "initial_state": None, "l2norm": True, "cu_seqlens": None, "chunk_size": 64}

    def our_forward():
        return gdn_forward_torch(*inputs, **options)

    def our_both():
        gdn_backward_torch(do, None, our_forward().saved, *inputs, **options)

    def their_forward():
        return their_chunks(*leaves, use_qk_l2norm_in_kernel=True)[0]

    def their_both():
        torch.autograd.grad(their_forward(), leaves, do)

    ours, theirs, ours_forward, theirs_forward = alternate(our_both, their_both, our_forward, their_forward)
    more = {"forward alone, times faster": round(theirs_forward / ours_forward, 2), "aim": AIM}
    report(benchmark, shape, our_both, ours=ours, theirs=theirs, threads=threads, **more)


@pytest.mark.benchmark(group="gated delta rule, one token")
def test_one_token(benchmark, threads):
    q, k, v, g, beta = make(8, 1, 16, 32, 128, 128)
    state = torch.randn(8, 32, 128, 128, generator=torch.Generator().manual_seed(1))
    flags = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def our_step():
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta, **flags)

    def their_step():
        return their_steps(*(each.repeat_interleave(2, dim=2) for each in (q, k)), v, g=g, beta=beta, **flags)

    torch.testing.assert_close(our_step(), their_step(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        ours, theirs = alternate(our_step, their_step)
    report(benchmark, "8 sequences H16 HV32 K128 V128", our_step, ours=ours, theirs=theirs, threads=threads)
