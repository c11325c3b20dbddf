import os
import random

import numpy
import pytest
import torch

from automodel.config.loader import ConfigNode
from automodel.config.sections import build_section
from automodel.training.rng import RngConfig, StatefulRNG, enable_determinism


@pytest.fixture(autouse=True)
def own_random_state():
    """What other tests draw stays as it was."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw():
    """An odd number of Gaussians, so that Python and NumPy keep one in hand."""
    return (
        [random.random(), random.gauss(0, 1), random.randrange(10**9)],
        numpy.random.normal(size=3).tolist(),
        numpy.random.randint(10**6, size=4).tolist(),
        torch.rand(3).tolist() + torch.randn(5).tolist(),
    )


def test_the_seed_decides_every_draw():
    StatefulRNG(7)
    first = draw()
    assert draw() != first
    StatefulRNG(seed=7)
    assert draw() == first
    StatefulRNG(8)
    assert draw() != first


def test_ranks_differ_only_when_ranked():
    StatefulRNG(7, ranked=True, rank=3)
    ranked = draw()
    StatefulRNG(10)
    assert draw() == ranked
    StatefulRNG(7, rank=3)
    unranked = draw()
    StatefulRNG(7)
    assert draw() == unranked
    StatefulRNG(2**32 - 1, ranked=True, rank=2)
    assert draw() != unranked


def test_the_state_survives_a_file(tmp_path):
    rng = StatefulRNG(7)
    draw()
    torch.save(rng.state_dict(), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    other = StatefulRNG(1)
    other.load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw(), draw()] == expected


def test_a_saved_state_is_a_copy():
    rng = StatefulRNG(7)
    state = rng.state_dict()
    expected = draw()
    rng.load_state_dict(state)
    assert draw() == expected
    rng.load_state_dict(state)
    assert draw() == expected


def test_a_newer_state_is_refused_before_anything_changes():
    rng = StatefulRNG(7)
    newer = rng.state_dict() | {"version": 2}
    StatefulRNG(8)
    with pytest.raises(ValueError, match="version 2, newer than 1"):
        rng.load_state_dict(newer)
    after = draw()
    StatefulRNG(8)
    assert draw() == after


def test_a_rank_without_a_state_is_seeded_from_that_of_rank_zero_and_its_number():
    rng = StatefulRNG(7)
    state = rng.state_dict()
    drawn = {0: draw()}
    for rank in (4, 5):
        rng.load_state_of_rank_zero(state, rank=rank)
        drawn[rank] = draw()
        rng.load_state_of_rank_zero(state, rank=rank)
        assert draw() == drawn[rank]
    later = rng.state_dict()
    rng.load_state_of_rank_zero(later, rank=4)
    drawn["later"] = draw()
    for kind in range(4):
        assert len({str(numbers[kind]) for numbers in drawn.values()}) == 4
    with pytest.raises(ValueError, match="version 2, newer than 1"):
        rng.load_state_of_rank_zero(state | {"version": 2}, rank=4)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_does_not_fit_is_named(seed):
    with pytest.raises(ValueError, match=f"rng.seed must be between 0 and 4294967295, got {seed}"):
        build_section(RngConfig, ConfigNode({"seed": seed}), "rng")


def test_the_section_of_an_existing_recipe():
    node = ConfigNode({"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 5, "ranked": True})
    assert build_section(RngConfig, node, "rng") == RngConfig(seed=5, ranked=True)
    assert build_section(RngConfig, None, "rng") == RngConfig(seed=42, ranked=False)


def test_determinism(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "any")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    benchmark = torch.backends.cudnn.benchmark
    try:
        enable_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


def test_determinism_keeps_the_users_workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        enable_determinism()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
