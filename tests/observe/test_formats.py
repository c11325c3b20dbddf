"""Numbers as people read them."""

import pytest

from automodel.observe.formats import format_compact, format_duration, format_learning_rate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0.00s"), (0.384, "0.38s"), (0.996, "1.0s"), (4.2, "4.2s"), (9.96, "10s"), (59.4, "59s")),
        *((59.6, "1m00s"), (125, "2m05s"), (3599.6, "1h00m"), (3725, "1h02m"), (86399, "23h59m")),
        *((273600, "3d04h"), (float("inf"), "-"), (float("nan"), "-")),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (7, "7"), (0.52, "0.52"), (950, "950"), (999.4, "999"), (999.9, "1k"), (7160, "7.16k")),
        *((12_345, "12.3k"), (999_900, "1M"), (4_560_000, "4.56M"), (1.2e9, "1.2B"), (3e12, "3T")),
        *((-7160, "-7.16k"), (float("nan"), "-"), (float("inf"), "-")),
    ],
)
def test_counts(value, text):
    assert format_compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3e-4, "3e-4"), (2.754e-5, "2.75e-5"), (0.1, "1e-1"), (float("nan"), "-")]
)
def test_learning_rates(value, text):
    assert format_learning_rate(value) == text
