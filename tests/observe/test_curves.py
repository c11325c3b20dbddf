"""Points, smoothing, thinning and ticks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automodel.observe.curves import (
    column,
    format_log_ticks,
    format_ticks,
    linear_ticks,
    log_ticks,
    smooth,
    split_and_thin,
)


def test_columns_are_sorted_by_step_and_hold_finite_numbers_only():
    rows = [{"step": 2, "loss": float("nan")}, {"step": 0, "loss": 3}, {"loss": 1.0}, {"step": 1, "loss": "x"}]
    assert column(rows, "loss") == [(0.0, 3.0), (1.0, None), (2.0, None)]


def test_smoothing_is_the_mean_of_a_centred_window_and_keeps_gaps():
    points = [(float(step), float(value)) for step, value in enumerate([4, 4, 1, 7, 7])]
    assert [value for _, value in smooth(points, span=3)] == [4.0, 3.0, 4.0, 5.0, 7.0]
    points[2] = (2.0, None)
    assert [value for _, value in smooth(points, span=3)] == [4.0, 4.0, None, 7.0, 7.0]


def test_a_straight_line_is_not_moved_by_smoothing():
    points = [(float(step), 2.0 * step) for step in range(100)]
    assert smooth(points, span=11)[:90] == points[:90]


def test_thinning_keeps_ends_and_spikes():
    points = [(float(step), math.sin(step)) for step in range(20_000)]
    points[7_777] = (7_777.0, 99.0)
    points[12_345] = (12_345.0, -99.0)
    (piece,) = split_and_thin(points, limit=1000)
    assert 900 < len(piece) <= 1000
    assert piece[0] == points[0]
    assert piece[-1] == points[-1]
    assert (7_777.0, 99.0) in piece
    assert (12_345.0, -99.0) in piece
    assert piece == sorted(piece)


def test_missing_values_break_a_curve_also_when_it_is_thinned():
    points = [(float(step), None if step in (5_000, 5_001) else 1.0) for step in range(10_000)]
    pieces = split_and_thin(points, limit=100)
    assert len(pieces) == 2
    assert pieces[0][-1][0] < 5_000
    assert pieces[1][0][0] > 5_001
    assert sum(map(len, pieces)) <= 100


def test_short_curves_are_not_thinned():
    points = [(float(step), float(step)) for step in range(1000)]
    assert split_and_thin(points, limit=1000) == [points]
    assert split_and_thin([(0.0, None)]) == []


@given(st.floats(-1e30, 1e30), st.floats(0, 1e30), st.integers(2, 8))
def test_linear_ticks_enclose_the_values_and_rise(low, spread, count):
    high = low + spread
    ticks = linear_ticks(low, high, count=count)
    slack = 1e-6 * max(abs(low), abs(high), spread)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert all(left < right for left, right in itertools.pairwise(ticks))
    assert 2 <= len(ticks) <= 2 * count + 3


@given(st.integers(-1, 10**7), st.integers(1, 10**7))
def test_whole_ticks_are_whole(low, spread):
    ticks = linear_ticks(low, low + spread, count=6, whole=True)
    assert ticks == [round(tick) for tick in ticks]
    assert ticks[0] <= low
    assert ticks[-1] >= low + spread
    assert all(left < right for left, right in itertools.pairwise(ticks))


@given(st.floats(1e-30, 1e30), st.floats(1, 1e30))
def test_log_ticks_enclose_the_values_and_rise(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * ratio * (1 - 1e-6)
    assert all(left < right for left, right in itertools.pairwise(ticks))
    assert len(ticks) <= 10


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 50, 100], ["0", "50", "100"]),
        ([0, 2000, 4000], ["0", "2k", "4k"]),
        ([3.5, 4, 4.5], ["3.5", "4.0", "4.5"]),
        ([0, 0.001, 0.002], ["0", "1e-3", "2e-3"]),
        ([0.02, 0.04], ["0.02", "0.04"]),
        ([100_000, 100_020], ["100,000", "100,020"]),
        ([0], ["0"]),
        ([], []),
    ],
)
def test_tick_labels_are_short_and_differ(ticks, labels):
    assert format_ticks(ticks) == labels


def test_log_tick_labels():
    assert format_log_ticks([0.001, 0.5, 5, 100, 20_000, 1e15]) == ["0.001", "0.5", "5", "100", "20k", "1e+15"]
