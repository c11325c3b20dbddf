"""Repair of damaged input-embedding rows in a single process: what is found, what is written, what is refused."""

import dataclasses
import logging
import math
import re

import pytest
import torch
from torch import nn

from automodel.config.loader import ConfigNode
from automodel.config.sections import build_section
from automodel.training.embedding_row_repair import (
    EmbeddingRowRepairConfig,
    EmbeddingRowRepairReport,
    UnhealthyRepairError,
    repair_input_embedding_rows,
)
from automodel.training.embedding_row_repair import _weight_view as weight_view

VOCAB, HIDDEN = 37, 12
NAME = "automodel.training.embedding_row_repair"


class Model(nn.Module):
    """Two embeddings that do not depend on the global random state."""

    def __init__(self, *, vocab=VOCAB, hidden=HIDDEN, dtype=torch.float32, padding_idx=None, bias=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden, dtype=dtype, padding_idx=padding_idx)
        self.lm_head = nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in (self.embed_tokens.weight, self.lm_head.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator))

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head


def damage(model, rows):
    """Sets whole rows of the input embedding: a number for each."""
    with torch.no_grad():
        for row, value in rows.items():
            model.embed_tokens.weight[row] = value
    return model


def values(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def expected_rows(before, ids, *, kept=(), target=None):
    """The whole input embedding after the repair, computed in float64 and rounded once; and the target norm."""
    weight, head = (before[f"{name}.weight"].double() for name in ("embed_tokens", "lm_head"))
    norms = weight.norm(dim=1)
    healthy = [row for row in range(len(norms)) if row not in ids and row not in kept]
    target = norms[healthy].square().mean().sqrt().item() if target is None else target
    result = before["embed_tokens.weight"].clone()
    for row in ids:
        result[row] = (head[row] / head[row].norm() * target).to(result.dtype)
    return result, target


def assert_repaired(model, before, ids, *, kept=(), target=None):
    expected, target = expected_rows(before, ids, kept=kept, target=target)
    weight = model.embed_tokens.weight.detach()
    untouched = [row for row in range(len(weight)) if row not in ids]
    assert torch.equal(bits(weight[untouched]), bits(before["embed_tokens.weight"][untouched]))
    error = (weight[list(ids)].double() - expected[list(ids)].double()).abs()
    assert (error <= 2 * torch.finfo(weight.dtype).eps * expected[list(ids)].double().abs()).all()
    assert torch.equal(bits(model.lm_head.weight), bits(before["lm_head.weight"]))
    return target


def assert_refused(model, match, *, error=ValueError, **arguments):
    before = values(model)
    with pytest.raises(error, match=match) as caught:
        repair_input_embedding_rows(model, **arguments)
    for name, value in values(model).items():
        assert torch.equal(bits(value), bits(before[name])), name
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_damaged_rows_get_the_direction_of_their_output_row(dtype):
    model = damage(Model(dtype=dtype), {1: 0.0, 3: 1e-8, 7: math.nan, 36: math.inf})
    before = values(model)
    report = repair_input_embedding_rows(model)
    target = assert_repaired(model, before, (1, 3, 7, 36))
    assert report == EmbeddingRowRepairReport(
        input_embedding_name="embed_tokens.weight",
        output_embedding_name="lm_head.weight",
        repaired_row_ids=(1, 3, 7, 36),
        min_norm_before=0.0,
        target_norm=report.target_norm,
        num_non_finite_rows=2,
        num_zero_rows_kept=0,
    )
    assert report.target_norm == pytest.approx(target, rel=1e-6)
    # A second repair finds nothing to do.
    after = values(model)
    again = repair_input_embedding_rows(model)
    assert (again.repaired_row_ids, again.target_norm) == ((), None)
    assert again.min_norm_before > 0
    assert torch.equal(bits(after["embed_tokens.weight"]), bits(model.embed_tokens.weight))


def test_the_threshold_is_inclusive():
    model = damage(Model(hidden=4), {1: 0.25, 2: 0.25001})
    assert repair_input_embedding_rows(model, min_norm=0.5).repaired_row_ids == (1,)


def test_a_row_that_is_not_finite_does_not_hide_the_smallest_norm():
    model = damage(Model(hidden=4), {1: math.nan, 2: -math.inf, 3: 1e-5})
    report = repair_input_embedding_rows(model)
    assert report.repaired_row_ids == (1, 2)
    assert report.min_norm_before == pytest.approx(2e-5)
    assert report.num_non_finite_rows == 2


def test_huge_and_tiny_finite_rows_keep_their_norms():
    model = damage(Model(hidden=4), {1: 1e20, 2: 1e-30})
    before = values(model)
    report = repair_input_embedding_rows(model, min_norm=1e-33, target="median")
    assert report.repaired_row_ids == ()
    assert report.min_norm_before == pytest.approx(2e-30, rel=1e-5)
    assert torch.equal(bits(before["embed_tokens.weight"]), bits(model.embed_tokens.weight))


def test_a_healthy_model_is_left_alone_and_logged(caplog):
    model, caplog_level = Model(), logging.INFO
    before = values(model)
    with caplog.at_level(caplog_level, NAME):
        report = repair_input_embedding_rows(model)
    smallest = before["embed_tokens.weight"].double().norm(dim=1).min().item()
    assert report.min_norm_before == pytest.approx(smallest, rel=1e-6)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"{report.min_norm_before:.6g}" in record.getMessage()
    assert all(torch.equal(bits(value), bits(before[name])) for name, value in values(model).items())


def test_a_repair_is_one_warning_with_the_ids_as_a_list(caplog):
    model = damage(Model(), {1: 0.0, 3: math.nan})
    with caplog.at_level(logging.INFO, NAME):
        report = repair_input_embedding_rows(model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "ids=[1, 3]" in text
    assert f"{report.min_norm_before:.6g}" in text
    assert f"{report.target_norm:.6g}" in text


def test_zero_rows_of_padding_and_beyond_the_vocabulary_are_kept(caplog):
    model = damage(Model(padding_idx=2), {2: 0.0, 5: 0.0, 33: 0.0, 34: 0.0, 35: 1e-9, 36: math.nan})
    before = values(model)
    with caplog.at_level(logging.INFO, NAME):
        report = repair_input_embedding_rows(model, max_rows=3, vocab_size=33)
    # A zero row of the vocabulary, and rows beyond it that are tiny or not finite, are damaged.
    assert report.repaired_row_ids == (5, 35, 36)
    assert report.num_zero_rows_kept == 3
    assert report.num_non_finite_rows == 1
    target = assert_repaired(model, before, (5, 35, 36), kept=(2, 33, 34))
    assert report.target_norm == pytest.approx(target, rel=1e-6)
    assert "3 rows zero as expected" in caplog.text


def test_zero_rows_that_are_kept_do_not_count_in_the_minimum():
    model = damage(Model(padding_idx=2), {2: 0.0, 36: 0.0})
    smallest = model.embed_tokens.weight.detach().double().norm(dim=1)[[*range(2), *range(3, 36)]].min().item()
    report = repair_input_embedding_rows(model, vocab_size=36)
    assert report.repaired_row_ids == ()
    assert report.num_zero_rows_kept == 2
    assert report.min_norm_before == pytest.approx(smallest, rel=1e-6)


def test_padding_rows_are_zero_only_when_they_are_exactly_so():
    model = damage(Model(padding_idx=2), {2: 1e-12})
    assert repair_input_embedding_rows(model, vocab_size=1).repaired_row_ids == (2,)
    model = damage(Model(padding_idx=2), {2: -0.0})
    assert repair_input_embedding_rows(model).num_zero_rows_kept == 1


def test_a_checkpoint_with_too_many_damaged_rows_is_refused():
    model = damage(Model(), dict.fromkeys(range(5), 0.0))
    text = assert_refused(model, "5 damaged rows", max_rows=4)
    assert "max_rows=4" in text
    assert repair_input_embedding_rows(model, max_rows=5).repaired_row_ids == (0, 1, 2, 3, 4)


def test_output_rows_that_are_damaged_too_are_named():
    model = damage(Model(), {1: 0.0, 3: 0.0, 5: 0.0})
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
        model.lm_head.weight[5] = 1e-8
        model.lm_head.weight[7] = 0.0
    assert_refused(model, re.escape("ids=[3, 5]"))


def test_a_table_without_healthy_rows_is_refused():
    assert_refused(damage(Model(), dict.fromkeys(range(VOCAB), 0.0)), "no healthy rows")
    model = damage(Model(), {1: 1e-9, **dict.fromkeys([0, *range(2, VOCAB)], 0.0)})
    assert_refused(model, "no healthy rows", vocab_size=1)


def test_tied_embeddings():
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    report = repair_input_embedding_rows(model)
    assert (report.repaired_row_ids, report.output_embedding_name) == ((), None)
    text = assert_refused(damage(model, {4: 0.0}), "tied")
    assert "cannot be repaired from itself" in text
    assert "ids=[4]" in text


def test_an_output_embedding_that_is_a_view_of_the_input_is_tied():
    model = Model()
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach().view(VOCAB, HIDDEN))
    assert_refused(damage(model, {4: 0.0}), "tied")


def test_a_model_without_an_output_embedding():
    model = Model()
    del model.lm_head
    model.get_output_embeddings = lambda: None
    report = repair_input_embedding_rows(model)
    assert report.output_embedding_name is None
    assert_refused(damage(model, {4: 0.0}), "no output embedding")


def test_a_model_without_an_input_embedding():
    assert_refused(nn.Sequential(nn.Linear(2, 2)), "Sequential has no input embedding")


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.ones(4), "2-D"),
        (torch.ones(4, 4, 4), "2-D"),
        (torch.ones(4, 4, dtype=torch.int8), "floating point, got torch.int8: quantised"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "quantised to torch.float8_e4m3fn"),
        (torch.ones(4, 4, dtype=torch.float64), "got torch.float64"),
        (torch.ones(4, 4, device="meta"), "meta device"),
        (torch.ones(4, 0), "empty"),
        (torch.ones(0, 4), "empty"),
    ],
)
def test_an_input_embedding_that_cannot_be_repaired(weight, match):
    model = Model()
    model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=match):
        repair_input_embedding_rows(model)


class Wrapped(torch.Tensor):
    pass


def test_a_wrapped_weight_is_refused():
    with pytest.raises(ValueError, match="embed is a Wrapped"):
        weight_view(torch.ones(4, 4).as_subclass(Wrapped), "embed")


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.ones(VOCAB + 1, HIDDEN), "shape"),
        (torch.ones(HIDDEN, VOCAB), "shape"),
        (torch.ones(VOCAB, HIDDEN, dtype=torch.int8), "quantised"),
        (torch.ones(VOCAB, HIDDEN, device="meta"), "meta device"),
    ],
)
def test_an_output_embedding_that_does_not_fit_matters_only_for_a_repair(weight, match):
    model = Model()
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    assert repair_input_embedding_rows(model).repaired_row_ids == ()
    damage(model, {4: 0.0})
    before = model.embed_tokens.weight.detach().clone()
    with pytest.raises(ValueError, match=match):
        repair_input_embedding_rows(model)
    assert torch.equal(before, model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_norm", 0.0),
        ("min_norm", "x"),
        ("min_norm", True),
        ("max_rows", 0),
        ("target", "mean"),
    ],
)
def test_settings_out_of_range(setting, value):
    with pytest.raises(ValueError, match=rf"^embedding_row_repair\.{setting} must be .*, got {value!r}"):
        EmbeddingRowRepairConfig(**{setting: value})
    assert_refused(damage(Model(), {1: 0.0}), rf"^{setting} must be .*, got {value!r}", **{setting: value})


@pytest.mark.parametrize("vocab_size", [0, "a", True, 2.0])
def test_vocab_size_out_of_range(vocab_size):
    match = f"^vocab_size must be a positive integer or None, got {vocab_size!r}"
    assert_refused(damage(Model(), {1: 0.0}), match, vocab_size=vocab_size)


def test_an_error_of_the_model_is_raised_as_it_is():
    model = damage(Model(), {1: 0.0})
    model.get_input_embeddings = lambda: {}["nothing"]
    assert_refused(model, "nothing", error=KeyError)


def test_a_row_that_would_overflow_changes_nothing():
    model = damage(Model(hidden=64, dtype=torch.float16), dict.fromkeys(range(VOCAB), 6e4))
    damage(model, {1: 0.0, 3: 0.0})
    with torch.no_grad():
        # The whole norm in one element of row 3, and evenly over those of row 1.
        model.lm_head.weight[1] = 1.0
        model.lm_head.weight[3] = 0.0
        model.lm_head.weight[3, 0] = 1.0
    text = assert_refused(model, "overflow", error=UnhealthyRepairError)
    assert "ids=[3]" in text
    assert_refused(model, "overflow", error=RuntimeError)


def test_a_row_that_would_vanish_changes_nothing():
    model = damage(Model(hidden=64, dtype=torch.float16), dict.fromkeys(range(VOCAB), 0.0))
    with torch.no_grad():
        # A norm that only a row with a single element can have.
        model.embed_tokens.weight[:, 0] = 2**-23
        model.embed_tokens.weight[4, 0] = 0.0
        model.lm_head.weight[4] = 1.0
    assert_refused(model, "vanish", error=RuntimeError, min_norm=2**-24)


def test_a_target_norm_that_outliers_distort_warns_and_the_median_is_offered(caplog):
    model = damage(Model(), {0: 1e4, 5: 0.0})
    before = values(model)
    with caplog.at_level(logging.WARNING, NAME):
        report = repair_input_embedding_rows(model)
    target = assert_repaired(model, before, (5,))
    assert report.target_norm == pytest.approx(target, rel=1e-6)
    assert "target: median" in caplog.text
    damage(model, {5: 0.0})
    caplog.clear()
    before = values(model)
    with caplog.at_level(logging.WARNING, NAME):
        report = repair_input_embedding_rows(model, target="median")
    norms = before["embed_tokens.weight"].double().norm(dim=1)
    healthy = norms[[row for row in range(VOCAB) if row != 5]].median().item()
    assert report.target_norm == pytest.approx(healthy, rel=1e-6)
    assert_repaired(model, before, (5,), target=healthy)
    assert len(caplog.records) == 1
    assert "(median)" in caplog.text


def test_a_frozen_weight_is_repaired_and_stays_frozen():
    model = damage(Model(), {1: 0.0})
    model.requires_grad_(False)
    parameter, before = model.embed_tokens.weight, values(model)
    assert repair_input_embedding_rows(model).repaired_row_ids == (1,)
    assert_repaired(model, before, (1,))
    assert model.embed_tokens.weight is parameter
    assert not parameter.requires_grad
    model.requires_grad_(True)
    damage(model, {1: 0.0})
    repair_input_embedding_rows(model)
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_the_output_embedding_may_have_another_dtype_and_the_input_other_strides():
    model = Model(dtype=torch.bfloat16)
    model.lm_head.float()
    wide = torch.full((VOCAB, 2 * HIDDEN), 7.0, dtype=torch.bfloat16)
    with torch.no_grad():
        wide[:, :HIDDEN] = model.embed_tokens.weight
    model.embed_tokens.weight = nn.Parameter(wide[:, :HIDDEN])
    damage(model, {1: 0.0, 9: 0.0})
    before = values(model)
    assert repair_input_embedding_rows(model).repaired_row_ids == (1, 9)
    assert_repaired(model, before, (1, 9))
    assert (wide[:, HIDDEN:] == 7).all(), "only the rows of the weight may be written"


def test_the_section():
    assert EmbeddingRowRepairConfig() == EmbeddingRowRepairConfig(True, 1e-6, 256, target="rms")
    node = ConfigNode({"min_norm": 1e-4, "max_rows": 3, "target": "median"})
    config = build_section(EmbeddingRowRepairConfig, node, "embedding_row_repair")
    assert config == EmbeddingRowRepairConfig(True, 1e-4, 3, target="median")
    with pytest.raises(ValueError, match=r"unknown key embedding_row_repair\.max_row \(did you mean 'max_rows'"):
        build_section(EmbeddingRowRepairConfig, ConfigNode({"max_row": 3}), "embedding_row_repair")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_rows = 5


def test_the_section_applies_its_settings():
    model = damage(Model(hidden=4), {1: 0.0, 2: 1e-5, 36: 0.0})
    assert EmbeddingRowRepairConfig(enabled=False).apply(model) is None
    assert not model.embed_tokens.weight[1].any()
    with pytest.raises(ValueError, match="max_rows=1"):
        EmbeddingRowRepairConfig(min_norm=1e-4, max_rows=1).apply(model)
    report = EmbeddingRowRepairConfig(min_norm=1e-4, target="median").apply(model, vocab_size=36)
    assert report.repaired_row_ids == (1, 2)
    assert report.num_zero_rows_kept == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.target_norm = 0.0


def test_pipeline_parallelism_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"needs distributed\.pp_size 1, got 2: the first stage holds"):
        EmbeddingRowRepairConfig().check_pipeline(2)
    EmbeddingRowRepairConfig().check_pipeline(1)
    EmbeddingRowRepairConfig().check_pipeline(None)
    EmbeddingRowRepairConfig(enabled=False).check_pipeline(2)
