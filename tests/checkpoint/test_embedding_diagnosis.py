"""Threshold, damaged rows and what could replace them."""

import math

import pytest

from automodel.checkpoint.embedding_diagnosis import diagnose, read_output_norms
from automodel.checkpoint.embedding_files import find_embeddings, read_squared_norms
from embedding_models import DAMAGED, INPUT, OUTPUT, make_weights, write_model


@pytest.fixture
def examine(tmp_path):
    def examine(*, damaged=None, drop=(), min_norm=None, vocab_size=None, **settings):
        weights = {name: each for name, each in make_weights(damaged=damaged).items() if name not in drop}
        found = find_embeddings(write_model(tmp_path / "model", weights, **settings))
        return diagnose(found, read_squared_norms(found.input), min_norm=min_norm, vocab_size=vocab_size)

    return examine


def test_without_a_threshold_the_gap_decides(examine):
    diagnosis = examine()
    assert diagnosis.damaged_ids == DAMAGED
    assert diagnosis.min_norm_from == "gap"
    assert diagnosis.gap.rows_below == 78
    assert diagnosis.gap.below < diagnosis.min_norm < diagnosis.gap.above
    assert diagnosis.healthy.rms == pytest.approx(
        math.sqrt(diagnosis.norms[diagnosis.classes.healthy].square().mean()), rel=1e-12
    )
    assert int(diagnosis.classes.healthy.sum()) == 2048 - 79


def test_a_given_threshold_decides(examine):
    diagnosis = examine(min_norm=1e-7)
    assert diagnosis.min_norm_from == "given"
    # The NaN and the four zeros.
    assert diagnosis.damaged_ids == DAMAGED[:5]


def test_healthy_rows_have_the_default_threshold(examine):
    diagnosis = examine(damaged={})
    assert diagnosis.damaged_ids == []
    assert (diagnosis.min_norm, diagnosis.min_norm_from, diagnosis.gap) == (1e-6, "default", None)


def test_zero_rows_of_padding_and_beyond_the_vocabulary_are_unused_and_make_no_gap(examine):
    diagnosis = examine(damaged={3: 0.0, 2046: 0.0, 2047: 0.0}, vocab_size=2046, pad_token_id=3)
    assert diagnosis.damaged_ids == []
    assert diagnosis.unused_ids == [3, 2046, 2047]
    assert diagnosis.gap is None


def test_output_norms_are_those_of_the_damaged_rows(examine):
    diagnosis = examine()
    norms = read_output_norms(diagnosis)
    expected = make_weights()[OUTPUT].double().norm(dim=1)
    assert list(norms) == DAMAGED
    assert list(norms.values()) == pytest.approx(expected[DAMAGED].tolist())


@pytest.mark.parametrize(("drop", "tied"), [((OUTPUT,), True), ((OUTPUT,), False)])
def test_there_are_none_without_a_separate_output(examine, drop, tied):
    assert read_output_norms(examine(drop=drop, tie_word_embeddings=tied)) == {}


def test_rows_that_a_shorter_output_lacks_have_none(tmp_path):
    weights = make_weights()
    weights[OUTPUT] = weights[OUTPUT][: DAMAGED[40]].contiguous()
    found = find_embeddings(write_model(tmp_path / "model", weights))
    assert list(read_output_norms(diagnose(found, read_squared_norms(found.input)))) == DAMAGED[:40]


def test_a_threshold_without_sense(examine):
    with pytest.raises(ValueError, match="min_norm must be positive and finite"):
        examine(min_norm=0.0)


def test_the_input_is_named(examine):
    assert examine().embeddings.input.key == INPUT
