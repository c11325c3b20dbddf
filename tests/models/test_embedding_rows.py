"""Damaged rows are told from healthy and unused ones; the gap and the histogram say where the norms lie."""

import math

import pytest
import torch

from automodel.models.embedding_rows import (
    check_limits,
    classify_rows,
    count_norms,
    find_gap,
    fits_dtype,
    summarize_norms,
)

NAN, INF = float("nan"), float("inf")


def squares(*norms):
    return torch.tensor(norms, dtype=torch.float64).square()


def ids(mask):
    return mask.nonzero().flatten().tolist()


def test_the_threshold_belongs_to_the_damaged_rows():
    rows = classify_rows(squares(0.5, 0.25, 0.2500001, 0.0, NAN, INF, 1e-30), min_norm=0.25)
    assert ids(rows.damaged) == [1, 3, 4, 5, 6]
    assert ids(rows.healthy) == [0, 2]
    assert ids(rows.unused) == []


def test_only_exactly_zero_rows_are_excused_for_padding_and_beyond_the_vocabulary():
    norms = squares(0.0, 0.0, 1.0, 0.0, 1e-9, NAN, 2.0, 0.0)
    rows = classify_rows(norms, min_norm=1e-6, padding_id=1, vocab_size=3)
    assert ids(rows.unused) == [1, 3, 7]
    assert ids(rows.damaged) == [0, 4, 5]
    assert ids(rows.healthy) == [2, 6]
    tiny_padding = classify_rows(squares(1e-9, 1.0), min_norm=1e-6, padding_id=0)
    assert ids(tiny_padding.damaged) == [0]


@pytest.mark.parametrize("first_row", [0, 3, 6, 9])
def test_a_shard_of_rows_is_judged_by_its_token_ids(first_row):
    norms = squares(*[0.0] * 9)
    whole = classify_rows(norms, min_norm=1e-6, padding_id=4, vocab_size=6)
    part = classify_rows(norms[first_row:], min_norm=1e-6, padding_id=4, vocab_size=6, first_row=first_row)
    assert part.unused.tolist() == whole.unused.tolist()[first_row:]
    assert part.damaged.tolist() == whole.damaged.tolist()[first_row:]


@pytest.mark.parametrize("min_norm", [0.0, -1.0, NAN, INF, "x", None, True, pytest.param(10**400, id="huge")])
def test_a_threshold_must_be_positive_and_finite(min_norm):
    with pytest.raises(ValueError, match=f"min_norm must be positive and finite, got {min_norm!r}"):
        check_limits(min_norm=min_norm, max_rows=1)


@pytest.mark.parametrize("max_rows", [0, -1, True, 1.5, "x", None])
def test_the_bound_must_be_a_positive_integer(max_rows):
    with pytest.raises(ValueError, match=f"^section.max_rows must be positive, got {max_rows!r}"):
        check_limits(min_norm=1.0, max_rows=max_rows, prefix="section.")


def test_rows_outside_the_range_of_a_dtype_do_not_fit():
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, -0.5, 0.5, 0.5], [0.0, -2.0, 0.0, 0.0], [2.0, -2.0, 2.0, 2.0]])
    norms = rows.double().norm(dim=1)
    largest = torch.finfo(torch.float16).max

    def fits(target_norm, columns=4, dtype=torch.float16):
        return fits_dtype(rows[:, :columns], norms=norms, target_norm=target_norm, dtype=dtype).tolist()

    assert fits(1.5 * largest) == [False, True, False, True]
    assert fits(0.9 * largest) == [True] * 4
    # At the end of the range the scaling may round up.
    assert fits(largest) == [False, True, False, True]
    assert fits(1.5 * largest, dtype=torch.bfloat16) == [True] * 4
    assert fits(1.5 * largest, columns=1) == [False, True, True, True]
    assert fits(1.5 * largest, columns=0) == [True] * 4


def test_summary():
    summary = summarize_norms(torch.tensor([3.0, 1.0, 2.0]))
    assert (summary.min, summary.median, summary.max) == (1.0, 2.0, 3.0)
    assert summary.rms == pytest.approx(math.sqrt(14 / 3))
    assert summarize_norms(torch.empty(0)) is None


def test_the_gap_lies_between_small_norms_and_the_bulk():
    gap = find_gap(torch.tensor([1.0, 1.2, 3e-5, 0.9, 0.0, 2e-5, 1.1, 1.3]))
    assert (gap.below, gap.above) == (pytest.approx(3e-5), pytest.approx(0.9))
    assert gap.rows_below == 3
    assert gap.min_norm == pytest.approx(5e-3)


def test_of_two_gaps_the_one_next_to_the_bulk_counts():
    gap = find_gap(torch.tensor([1e-14, 1e-5, 2e-5, *[1.0] * 9], dtype=torch.float64))
    assert (gap.below, gap.above, gap.rows_below) == (2e-5, 1.0, 3)


def test_a_factor_below_a_hundred_is_no_gap():
    assert find_gap(torch.tensor([0.011, *[1.0] * 5])) is None
    assert find_gap(torch.tensor([0.009, *[1.0] * 5])).rows_below == 1


def test_large_outliers_are_no_gap():
    assert find_gap(torch.tensor([*[1.0] * 5, 1e6, 1e7])) is None


def test_the_default_threshold_is_suggested_where_it_separates():
    assert find_gap(torch.tensor([1e-9, 1.0, 1.0])).min_norm == 1e-6
    assert find_gap(torch.tensor([0.0, 1.0, 1.0])).min_norm == 1e-6
    assert find_gap(torch.tensor([0.0, 1e-6, 1e-6])).min_norm == pytest.approx(1e-8)
    assert find_gap(torch.tensor([9e-8, 2e-3, 3e-3])).min_norm == 1e-6
    assert find_gap(torch.tensor([5e-7, 2e-3, 3e-3])).min_norm == pytest.approx(3e-5)


@pytest.mark.parametrize("norms", [[], [0.0, 0.0], [1.0]])
def test_too_few_norms_have_no_gap(norms):
    assert find_gap(torch.tensor(norms)) is None


def test_the_histogram_counts_every_row_once():
    histogram = count_norms(torch.tensor([0.0, NAN, INF, 1.5e-7, 1.0, 1.5, 1.5, 7.0], dtype=torch.float64))
    assert (histogram.zero, histogram.nonfinite, sum(histogram.counts)) == (1, 2, 5)
    assert histogram.bin_width == 0.5
    assert histogram.first_edge == -7.0
    assert len(histogram.counts) == 16
    assert (histogram.counts[0], histogram.counts[14], histogram.counts[15]) == (1, 3, 1)


@pytest.mark.parametrize("decades", [0, 0.3, 3, 80, 600])
@pytest.mark.parametrize("max_bins", [2, 24])
def test_the_histogram_has_few_bins_and_full_ends(decades, max_bins):
    norms = torch.logspace(-decades / 2, decades / 2, 50, dtype=torch.float64)
    histogram = count_norms(norms, max_bins=max_bins)
    assert 1 <= len(histogram.counts) <= max_bins
    assert sum(histogram.counts) == 50
    assert histogram.counts[0] > 0
    assert histogram.counts[-1] > 0


def test_the_histogram_of_nothing():
    assert count_norms(torch.tensor([0.0, NAN])).counts == ()
