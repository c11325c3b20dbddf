"""Plots as inline SVG: curves over steps, shares of a whole, durations. Colours come from the page's style sheet."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import TYPE_CHECKING, Literal

from automodel.observe.curves import (
    Point,
    finite_values,
    format_log_ticks,
    format_ticks,
    linear_ticks,
    log_ticks,
    split_and_thin,
)
from automodel.observe.formats import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from automodel.observe.timeline import Phase

__all__ = ["Curve", "ShareRow", "curve_plot", "duration_plot", "share_plot"]

_PLOT_WIDTH = 520.0
_LOG_RATIO = 50.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A line over steps: its points, its colour (1 to 5 of the style sheet) and how it is drawn."""

    label: str
    points: Sequence[Point]
    color: int
    style: Literal["line", "faint", "marked"] = "line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareRow:
    """A bar of a share plot: a label and its parts as (name, seconds, colour)."""

    label: str
    parts: Sequence[tuple[str, float, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frame:
    """The rectangle of a plot, in the units of its viewBox, and the values its sides stand for."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, step: float) -> float:
        """The horizontal place of a step."""
        return self.left + (step - self.x_low) / (self.x_high - self.x_low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """The vertical place of a value."""
        low, high = self.y_low, self.y_high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)


def curve_plot(
    curves: Sequence[Curve],
    *,
    title: str,
    unit: str,
    from_zero: bool = False,
    may_be_log: bool = False,
    marks: Sequence[float] = (),
    large: bool = False,
) -> str:
    """Draw curves over the step as an <svg>; "" when no curve has a finite value.

    Args:
        curves: the lines, drawn in this order.
        title: what the plot shows, for screen readers and as its tooltip.
        unit: unit of the values, written above the vertical axis.
        from_zero: begin the vertical axis at zero.
        may_be_log: use a logarithmic axis when the values are positive and span more than a factor of 50.
        marks: steps to mark on the horizontal axis.
        large: draw the large format.
    """
    values = [value for curve in curves for value in finite_values(curve.points)]
    if not values:
        return ""
    log = may_be_log and min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    if log:
        y_ticks = log_ticks(min(values), max(values))
    else:
        y_ticks = linear_ticks(0.0 if from_zero else min(values), max(values), count=5)
    steps = [step for curve in curves for step, _ in curve.points]
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    frame = _Frame(
        width=700.0 if large else _PLOT_WIDTH,
        height=360.0 if large else 230.0,
        left=62.0 if large else 50.0,
        right=14.0 if large else 12.0,
        top=40.0 if large else 34.0,
        bottom=54.0 if large else 44.0,
        x_low=x_low,
        x_high=x_high,
        y_low=y_ticks[0],
        y_high=y_ticks[-1],
        log=log,
    )
    body = [
        *_draw_axes(frame, y_ticks, f"{unit}, log scale" if log else unit),
        *(f'<path class="mark" d="M{frame.x(step):.1f} {frame.height - frame.bottom:.1f}v-9"/>' for step in marks),
        *(part for curve in curves for part in _draw_curve(frame, curve)),
    ]
    return _wrap(body, title=title, width=frame.width, height=frame.height, kind="plot large" if large else "plot")


def share_plot(rows: Sequence[ShareRow], *, title: str) -> str:
    """Draw each row as a bar of full width, its parts in proportion, as an <svg>; "" without a row of positive sum."""
    body: list[str] = []
    top = 0.0
    for row in rows:
        total = sum(seconds for _, seconds, _ in row.parts)
        if total <= 0:
            continue
        body.append(_text(0, top + 15, row.label, kind="name"))
        body.append(_text(_PLOT_WIDTH, top + 15, format_duration(total), kind="value", anchor="end"))
        left = 0.0
        for name, seconds, color in row.parts:
            width = seconds / total * _PLOT_WIDTH
            tip = html.escape(f"{name}: {format_duration(seconds)} ({seconds / total:.0%})")
            body.append(
                f'<rect class="fill{color}" x="{left:.1f}" y="{top + 24:.1f}" width="{width:.1f}" height="24">'
                f"<title>{tip}</title></rect>"
            )
            if width > 48:
                body.append(_text(left + width / 2, top + 41, f"{seconds / total:.0%}", kind="inside", anchor="middle"))
            left += width
        top += 68
    return _wrap(body, title=title, width=_PLOT_WIDTH, height=top - 16, kind="plot bars") if body else ""


def duration_plot(phases: Sequence[Phase], *, title: str) -> str:
    """Draw each phase as a bar whose length is its time, as an <svg>; "" without phases."""
    if not phases:
        return ""
    longest = max(phase.seconds for phase in phases) or 1.0
    body: list[str] = []
    for index, phase in enumerate(phases):
        top = index * 38.0
        width = max(1.5, phase.seconds / longest * _PLOT_WIDTH)
        body.append(_text(0, top + 15, phase.name, kind="name"))
        body.append(_text(_PLOT_WIDTH, top + 15, format_duration(phase.seconds), kind="value", anchor="end"))
        body.append(f'<rect class="track" x="0" y="{top + 22:.1f}" width="{_PLOT_WIDTH:.0f}" height="7" rx="2"/>')
        body.append(f'<rect class="fill1" x="0" y="{top + 22:.1f}" width="{width:.1f}" height="7" rx="2"/>')
    return _wrap(body, title=title, width=_PLOT_WIDTH, height=len(phases) * 38.0 - 6, kind="plot bars")


def _draw_axes(frame: _Frame, y_ticks: Sequence[float], unit: str) -> list[str]:
    """Grid lines, the horizontal axis, tick labels, the unit and the name of the horizontal axis."""
    right = frame.width - frame.right
    base = frame.height - frame.bottom
    parts = [_text(0, frame.top - 23, unit, kind="unit")]
    y_labels = format_log_ticks(y_ticks) if frame.log else format_ticks(y_ticks)
    for tick, label in zip(y_ticks, y_labels, strict=True):
        place = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {place:.1f}H{right:.1f}"/>')
        parts.append(_text(frame.left - 8, place + 4, label, anchor="end"))
    ticks = linear_ticks(frame.x_low, frame.x_high, count=6, whole=True)
    # Steps count from 0: the validation before training stands left of the first tick.
    ticks = [tick for tick in ticks if max(0.0, frame.x_low) <= tick <= frame.x_high]
    parts.append(f'<path class="axis" d="M{frame.left:.1f} {base:.1f}H{right:.1f}"/>')
    for tick, label in zip(ticks, format_ticks(ticks), strict=True):
        place = frame.x(tick)
        parts.append(f'<path class="axis" d="M{place:.1f} {base:.1f}v5"/>')
        # A label at the right end would run over the edge of the picture.
        if place > right - 12:
            parts.append(_text(right, base + 20, label, anchor="end"))
        else:
            parts.append(_text(place, base + 20, label, anchor="middle"))
    parts.append(_text((frame.left + right) / 2, frame.height - 5, "step", kind="unit", anchor="middle"))
    return parts


def _draw_curve(frame: _Frame, curve: Curve) -> list[str]:
    """The path of a curve, and a dot at each point of a marked one and at each lone point."""
    parts: list[str] = []
    commands: list[str] = []
    for piece in split_and_thin(curve.points):
        places = [f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in piece]
        if len(places) > 1:
            commands.append(f"M{places[0]}L{' '.join(places[1:])}")
        if curve.style == "marked" or len(places) == 1:
            parts.extend(_draw_dot(frame, curve, step, value) for step, value in piece)
    return [f'<path class="curve line{curve.color} {curve.style}" d="{"".join(commands)}"/>', *parts]


def _draw_dot(frame: _Frame, curve: Curve, step: float, value: float) -> str:
    """A dot with a tooltip; smaller where it only stands for a piece of line that has no length."""
    tip = html.escape(f"{curve.label}, step {step:.0f}: {value:.4g}")
    return (
        f'<circle class="fill{curve.color} dot" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" '
        f'r="{4.5 if curve.style == "marked" else 3.5}"><title>{tip}</title></circle>'
    )


def _text(
    x: float, y: float, text: str, *, kind: str = "tick", anchor: Literal["start", "middle", "end"] = "start"
) -> str:
    """A <text> element."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _wrap(body: Sequence[str], *, title: str, width: float, height: float, kind: str) -> str:
    """The <svg> element around drawn parts."""
    return (
        f'<svg class="{kind}" role="img" viewBox="0 0 {width:.0f} {height:.0f}" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{''.join(body)}</svg>"
    )
