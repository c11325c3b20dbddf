"""What every registered operator must keep, whatever it is; the operators' own tests say the rest."""

import random
from itertools import chain

import pytest
import torch
import triton

from automodel_kernels.aot import compile_for, compile_pairs, op_requests
from automodel_kernels.hardware import TARGETS, find_target
from automodel_kernels.resources import (
    default_sample,
    fit_problem,
    load_table,
    source_hash,
    table_problems,
    variants,
)
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.accuracy import example_errors, run_with_gradients
from automodel_kernels.tuning.registry import load_all

OPS = load_all()
SMALL = [
    pytest.param(op, example, id=f"{op.name}-{example.label}")
    for op in OPS
    for example in op.examples()
    if not example.large
]
SAMPLES = 4

each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_small_example = pytest.mark.parametrize(("op", "example"), SMALL)


def test_the_committed_table_is_up_to_date_and_every_configuration_fits():
    assert table_problems(load_table(), OPS) == [], "run `make tables`"


def test_defaults_and_a_sample_compile_to_what_the_table_says(tmp_path):
    """Every launch's default on one target, the first launch's on all, and a few others.

    All of them take most of a minute. Which ones they are changes with the sources and with nothing else.
    """
    kernels = [(f"{op.name}/{kernel.name}", kernel) for op in OPS for kernel in op.kernels]
    every = [
        (name, variant)
        for name, kernel in kernels
        for target in TARGETS.values()
        for variant in variants(kernel, target)
    ]
    sources = {name: source_hash(kernel) for name, kernel in kernels}
    chance = random.Random("".join(sources.values()))
    others = [each for each in every if not each[1].default]
    defaults = [
        (name, variant) for name, kernel in kernels for variant in default_sample(kernel, turn=int(sources[name], 16))
    ]
    chosen = defaults + chance.sample(others, min(SAMPLES, len(others)))
    pairs = [(variant.target, variant.request) for _, variant in chosen]
    outcomes = compile_pairs(pairs, cache_dir=tmp_path)
    assert {outcome.request.label: outcome.error for outcome in outcomes if outcome.error} == {}
    found = {
        variant.label: (outcome.resources, variant) for (_, variant), outcome in zip(chosen, outcomes, strict=True)
    }
    assert [problem for each in found.values() if (problem := fit_problem(*each))] == []
    table = load_table()
    if table.triton == triton.__version__:
        rows = [table.entries[name].rows[variant.label].resources for name, variant in chosen]
        assert [outcome.resources for outcome in outcomes] == rows


@each_op
def test_running_an_operator_launches_what_it_registered_and_nothing_else(triton_cache, op):
    target = find_target("sm_90")
    declared = {outcome.key for outcome in compile_for(target, op_requests(op, target), measure=False)}
    with target_driver(target) as driver:
        for example in op.examples():
            if not example.large:
                run_with_gradients(op, op.run, inputs=example.inputs(torch.device("cpu")))
    assert driver.launches
    assert {binary.name for binary in driver.compiled} == set(), "compiled anew: no registered launch has this key"
    assert {binary.key for binary in driver.binaries} <= declared


@each_small_example
def test_the_torch_path_matches_the_reference(op, example):
    for name, error in example_errors(op, example, device=torch.device("cpu")).items():
        assert error <= example.tolerance, name


@pytest.mark.interpreter
@pytest.mark.usefixtures("narrow_floats", "poison")
@each_small_example
def test_the_kernels_match_the_reference_under_the_interpreter(op, example):
    for name, error in example_errors(op, example, device=torch.device("cpu")).items():
        assert error <= example.tolerance, name


@each_op
def test_examples_have_different_labels_and_cost_nothing_on_the_meta_device(op):
    labels = [example.label for example in op.examples()]
    assert len(set(labels)) == len(labels)
    assert any(example.large for example in op.examples()), "bench/gpu_check.py times the large ones"
    for example in op.examples():
        inputs = example.inputs(torch.device("meta"))
        costs = [op.cost(**inputs)] + [op.backward_cost(**inputs) for _ in op.gradients[:1]]
        assert all(cost.moved_bytes > 0 and cost.flops >= 0 for cost in costs)


@each_op
def test_every_kernel_has_a_configuration_for_every_launch_on_some_target(op):
    for kernel in op.kernels:
        claimed = chain.from_iterable(kernel.claimed(target) for target in TARGETS.values())
        assert {launch.label for launch, _ in claimed} == {launch.label for launch in kernel.launches()}
