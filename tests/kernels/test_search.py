"""Tuning over plain functions in the place of kernels; with real kernels it is tested in test_autotune.py."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.candidates import Config
from automodel_kernels.tuning.search import NoMemoryError, Search
from automodel_kernels.tuning.store import Trial

CONFIGS = tuple(Config(meta={"ADD": add}) for add in (1, 2, 3))
STATIC, SECOND, THIRD = (config.label for config in CONFIGS)


def search_for(run, *, recorded=None, written=("out",), restores=(), most_bytes=None, bit_exact=False, **arguments):
    return Search(
        run=run,
        name="some.module:some_kernel",
        key={"x_ptr": "float32"},
        device=torch.device("cpu"),
        device_name="Toy GPU",
        arguments=arguments,
        written=written,
        restores=restores,
        bit_exact=bit_exact,
        most_bytes=most_bytes,
        record=(recorded if recorded is not None else []).append,
    )


@pytest.fixture(autouse=True)
def timer():
    """Launches are timed by what they return."""
    with target_driver("sm_90") as driver:
        yield driver


def add(out, *, ADD, warmup, **_options):
    if not warmup:
        out += ADD


def test_strides_are_kept_and_what_is_changed_is_not_touched():
    base = torch.zeros(4, 10)
    seen = []

    def run(out, **options):
        seen.append(out.stride())
        add(out, **options)

    tuning = search_for(run, restores=("out",), out=base[:, ::2]).tune(CONFIGS, known={})
    assert (base == 0).all()
    assert set(seen) == {(10, 2)}
    assert tuning.extra_bytes == (3 * 10 + 4 * 2 + 1) * 4, "from the first to the last element"


def test_what_is_only_written_is_not_copied_without_the_gate():
    out = torch.zeros(4)
    assert search_for(add, out=out).tune(CONFIGS, known={}).extra_bytes == 0
    out = torch.zeros(4)
    assert search_for(add, out=out, bit_exact=True).tune(CONFIGS, known={}).extra_bytes == 2 * 16
    assert (out == 0).all()


def test_the_gate_compares_bits_not_values():
    def run(out, *, ADD, warmup, **_options):
        out.copy_(torch.tensor([-0.0, float("nan")]) if ADD == 2 else torch.tensor([0.0, float("nan")]))

    tuning = search_for(run, out=torch.zeros(2), bit_exact=True).tune(CONFIGS, known={})
    assert [bool(trial.reason) for trial in tuning.trials] == [False, True, False]


def test_the_gate_drops_a_candidate_that_leaves_something_unwritten():
    def run(out, *, ADD, warmup, **_options):
        out[: 1 if ADD == 3 else 2] = 7

    tuning = search_for(run, out=torch.zeros(2), bit_exact=True).tune(CONFIGS, known={})
    assert [bool(trial.reason) for trial in tuning.trials] == [False, False, True]


def test_with_the_gate_a_static_choice_that_fails_ends_it():
    def run(out, *, ADD, warmup, **_options):
        if ADD == 1:
            raise OutOfResources(2, 1, "registers")

    with pytest.raises(RuntimeError, match=r"no configuration works for .* on Toy GPU:\n  ADD=1 .*registers"):
        search_for(run, out=torch.zeros(2), bit_exact=True).tune(CONFIGS, known={})
    assert search_for(run, out=torch.zeros(2)).tune(CONFIGS, known={}).chosen is CONFIGS[1]


def test_more_memory_than_may_be_taken_is_refused_before_anything_runs():
    with pytest.raises(NoMemoryError, match="takes 16 bytes, and 15 may be taken"):
        search_for(None, restores=("out",), most_bytes=15, out=torch.zeros(4)).tune(CONFIGS, known={})
    with pytest.raises(NoMemoryError, match="takes 32 bytes"):
        search_for(None, bit_exact=True, most_bytes=31, out=torch.zeros(4)).tune(CONFIGS, known={})
    assert search_for(add, restores=("out",), most_bytes=16, out=torch.zeros(4)).tune(CONFIGS, known={})


def test_memory_that_ran_out_is_not_recorded_and_the_winner_is_not_final():
    def run(out, *, ADD, warmup, **_options):
        if ADD == 2:
            raise torch.OutOfMemoryError("no more")

    recorded = []
    tuning = search_for(run, recorded=recorded, out=torch.zeros(2)).tune(CONFIGS, known={})
    assert "no more" in tuning.trials[1].reason
    assert [trial.config for trial in recorded] == [STATIC, THIRD]
    assert not tuning.final


def test_each_trial_is_recorded_before_the_next_begins():
    recorded, lengths = [], []

    def run(out, **_options):
        lengths.append(len(recorded))

    search_for(run, recorded=recorded, out=torch.zeros(2)).tune(CONFIGS, known={})
    assert lengths == [0, 0, 1, 1, 2, 2]


def test_what_is_known_is_not_measured(timer):
    known = {
        STATIC: Trial(config=STATIC, milliseconds=5.0),
        SECOND: Trial(config=SECOND, reason="too large"),
        "old": Trial(config="old", milliseconds=0.1),
    }
    tuning = search_for(add, out=torch.zeros(1)).tune(CONFIGS, known=known)
    assert (timer.measured, tuning.measured) == (1, 1)
    assert tuning.chosen is CONFIGS[2]
    known[THIRD] = Trial(config=THIRD, milliseconds=6.0)
    tuning = search_for(None, out=torch.zeros(1), restores=("out",), most_bytes=0).tune(CONFIGS, known=known)
    assert (tuning.measured, tuning.chosen) == (0, CONFIGS[0])


def test_a_fault_of_the_gpu_is_not_one_candidates_failure():
    def run(out, *, ADD, warmup, **_options):
        if not warmup:
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search_for(run, out=torch.zeros(1)).tune(CONFIGS, known={})


def test_it_says_what_came_of_it():
    text = str(search_for(add, out=torch.zeros(1)).tune(CONFIGS, known={}))
    assert "some.module:some_kernel for {'x_ptr': 'float32'} on Toy GPU: ADD=1 warps=4 stages=1 takes 1 ms" in text
    assert "3 candidates, 3 measured, 0 failed" in text
