"""The numbers behind a plot: columns of rows as points, smoothing, thinning, ticks."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from automodel.observe.formats import format_compact, format_learning_rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MAX_POINTS",
    "Point",
    "column",
    "finite_number",
    "finite_values",
    "format_log_ticks",
    "format_ticks",
    "linear_ticks",
    "log_ticks",
    "smooth",
    "split_and_thin",
]

Point = tuple[float, float | None]
"""A step and a value; None where the row has no finite number."""

MAX_POINTS = 1000
"""Most points that a curve is drawn with."""


def column(rows: Sequence[Mapping[str, object]], key: str) -> list[Point]:
    """The values of `key` over the steps, in the order of the steps; rows without a step are left out."""
    points: list[Point] = []
    for row in rows:
        step = finite_number(row.get("step"))
        if step is not None:
            points.append((step, finite_number(row.get(key))))
    return sorted(points, key=lambda point: point[0])


def finite_values(points: Sequence[Point]) -> list[float]:
    """The values that are there."""
    return [value for _, value in points if value is not None]


def smooth(points: Sequence[Point], *, span: int) -> list[Point]:
    """Mean of the values within `span` points around each point; a centred window, so that nothing lags.

    At the start the window shrinks on both sides alike (a falling curve would otherwise begin too low), at the end it
    takes what there is. A missing value stays missing.
    """
    sums, counts = [0.0], [0]
    for _, value in points:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    smoothed: list[Point] = []
    for index, (step, value) in enumerate(points):
        reach = min(span // 2, index)
        low, high = index - reach, min(len(points), index + reach + 1)
        mean = (sums[high] - sums[low]) / max(1, counts[high] - counts[low])
        smoothed.append((step, None if value is None else mean))
    return smoothed


def split_and_thin(points: Sequence[Point], *, limit: int = MAX_POINTS) -> list[list[tuple[float, float]]]:
    """The unbroken pieces of a curve, thinned to at most `limit` points in all.

    A missing value breaks the curve. Thinning keeps the lowest and the highest point of each stretch, so that a spike
    stays visible, and the first and the last point.
    """
    numbered: list[tuple[int, float, float]] = []
    piece = 0
    for step, value in points:
        if value is None:
            piece += 1
        else:
            numbered.append((piece, step, value))
    pieces: dict[int, list[tuple[float, float]]] = {}
    for piece, step, value in _thin(numbered, limit):
        pieces.setdefault(piece, []).append((step, value))
    return list(pieces.values())


def _thin(points: list[tuple[int, float, float]], limit: int) -> list[tuple[int, float, float]]:
    """First, last, and the lowest and the highest point of each of the equal stretches between them."""
    if len(points) <= limit:
        return points
    stretches = (limit - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        ends = {
            min(range(len(stretch)), key=lambda place: stretch[place][2]),
            max(range(len(stretch)), key=lambda place: stretch[place][2]),
        }
        kept.extend(stretch[place] for place in sorted(ends))
    kept.append(points[-1])
    return kept


def linear_ticks(low: float, high: float, *, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that enclose `low` to `high`.

    With `whole` they are whole numbers.
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        # Equal but for rounding: room on both sides, or all ticks would fall together.
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if rough <= factor * magnitude * 1.0001)
    if whole:
        step = max(1.0, round(step))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose `low` to `high` (both positive), with 2 and 5 between them on a short axis."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    decades = last - first
    if decades > 8:
        stride = math.ceil(decades / 6)
        return [10.0**exponent for exponent in range(first, last + stride, stride)]
    factors = (1, 2, 5) if decades <= 2 else (1,)
    ticks = [factor * 10.0**exponent for exponent in range(first, last) for factor in factors]
    return [*ticks, 10.0**last]


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Labels for ticks: as short as they can be while all of them differ."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if 0 < largest < 0.01:
        return [format_learning_rate(tick) for tick in ticks]
    compact = [format_compact(tick) for tick in ticks]
    if largest >= 1000 and len(set(compact)) == len(ticks):
        return compact
    gap = min((high - low for low, high in itertools.pairwise(ticks)), default=1.0)
    decimals = min(12, max(0, -math.floor(math.log10(gap) + 1e-9))) if gap > 0 else 0
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def format_log_ticks(ticks: Sequence[float]) -> list[str]:
    """Labels for the ticks of a logarithmic axis: 0.02, 5, 100, 20k, 1e+15."""
    return [format_compact(tick) if 1e3 <= tick < 1e15 else f"{tick:g}" for tick in ticks]


def finite_number(value: object) -> float | None:
    """`value` when it is a finite number, None for anything else."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return float(value) if math.isfinite(value) else None
    return None
