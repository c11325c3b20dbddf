"""Histograms of norms over a logarithmic axis: text for a terminal, SVG for a file."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

from automodel.observe.formats import format_compact

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["format_norm", "norm_histogram_lines", "norm_histogram_svg"]

_BAR_WIDTH = 40

_STYLE = """
svg{--paper:#fff;--ink:#1b2027;--muted:#5c6773;--line:#e2e6ea;--good:#1f5fa8;--bad:#c2521a;background:var(--paper);
font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;font-variant-numeric:tabular-nums}
@media (prefers-color-scheme:dark){svg{--paper:#12161b;--ink:#e5e9ed;--muted:#9aa6b2;--line:#2a323b;--good:#6eaaf0;
--bad:#f0965a}}
text{fill:var(--muted)}.title{fill:var(--ink);font-size:14px;font-weight:600}.grid{stroke:var(--line)}
.axis{stroke:var(--muted)}.good{fill:var(--good)}.bad{fill:var(--bad)}.limit{stroke:var(--bad);stroke-dasharray:4 3}
.limit-name{fill:var(--bad)}
"""
_WIDTH, _HEIGHT = 720.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 62.0, 48.0


def format_norm(value: float) -> str:
    """Write a norm with three significant digits: 1.07, 3.2e-8, 0, nan, inf."""
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def norm_histogram_lines(
    counts: Sequence[int], *, first_edge: float, bin_width: float, zero: int, nonfinite: int, limit: float
) -> list[str]:
    """Draw a histogram for a terminal, in ASCII; the length of a bar grows with the logarithm of its count.

    Args:
        counts: Rows in each bin.
        first_edge: log10 of the lower edge of the first bin.
        bin_width: Width of a bin, in decades.
        zero: Exactly zero rows, drawn under the bins.
        nonfinite: Rows whose norm is no finite number, drawn over them.
        limit: The norm up to which rows are damaged, drawn as a line between two bins.
    """
    largest = max([*counts, zero, nonfinite, 1])
    edges = [first_edge + bin_width * place for place in range(len(counts) + 1)]
    rows: list[tuple[str, int]] = [("0", zero)] if zero else []
    limit_at = 1 if zero else 0
    for place, count in enumerate(counts):
        rows.append((f"{_edge(edges[place])} .. {_edge(edges[place + 1])}", count))
        # The line stands under the bin that the limit falls into, so that no healthy row is drawn before it.
        limit_at += math.log10(limit) >= edges[place + 1]
    if nonfinite:
        rows.append(("nan, inf", nonfinite))
    labels = max(len(label) for label, _ in [*rows, ("norm", 0)])
    numbers = max(len(f"{count:,}") for _, count in [*rows, ("rows", 1000)])
    lines = [f"{'norm':<{labels}}  {'rows':>{numbers}}"]
    limit_line = f"{f' min_norm {format_norm(limit)} ':-^{labels + numbers + 2}}"
    for place, (label, count) in enumerate(rows):
        if place == limit_at:
            lines.append(limit_line)
        bar = "#" * _share(count, largest, _BAR_WIDTH)
        lines.append(f"{label:<{labels}}  {count:>{numbers},}  {bar}".rstrip())
    return lines if limit_at < len(rows) else [*lines, limit_line]


def norm_histogram_svg(
    counts: Sequence[int],
    *,
    first_edge: float,
    bin_width: float,
    zero: int,
    nonfinite: int,
    limit: float,
    title: str,
) -> str:
    """Draw the same histogram as a self-contained SVG file; bars under the limit have a colour of their own."""
    edges = [first_edge + bin_width * place for place in range(len(counts) + 1)]
    slots = [_Slot("0", zero, True)] if zero else []
    slots += [
        _Slot(f"{_edge(low)} to {_edge(high)}", count, 10**high <= limit * (1 + 1e-9))
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    slots += [_Slot("nan, inf", nonfinite, True)] if nonfinite else []
    largest = max([slot.rows for slot in slots] or [1])
    base, width = _HEIGHT - _BOTTOM, (_WIDTH - _LEFT - _RIGHT) / max(1, len(slots))
    bins_left = _LEFT + (width if zero else 0)
    body = [_text(_LEFT, 22, title, kind="title"), _text(_LEFT, 44, "rows, log scale")]
    for exponent in range(math.floor(math.log10(max(1, largest))) + 1):
        place = base - _height(10**exponent, largest)
        body.append(f'<path class="grid" d="M{_LEFT:.1f} {place:.1f}H{_WIDTH - _RIGHT:.1f}"/>')
        body.append(_text(_LEFT - 8, place + 4, format_compact(10**exponent), anchor="end"))
    for index, slot in enumerate(slots):
        left, height = _LEFT + index * width, _height(slot.rows, largest)
        if slot.rows:
            body.append(
                f'<rect class="{"bad" if slot.is_damaged else "good"}" x="{left + 1:.1f}" y="{base - height:.1f}" '
                f'width="{max(1.0, width - 2):.1f}" height="{height:.1f}">'
                f"<title>{slot.label}: {slot.rows:,} rows</title></rect>"
            )
    if zero:
        body.append(_text(_LEFT + width / 2, base + 18, "0", anchor="middle"))
    if nonfinite:
        body.append(_text(_WIDTH - _RIGHT, base + 18, "nan, inf", anchor="end"))
    for index in _tick_places(edges):
        body.append(_text(bins_left + index * width, base + 18, _edge(edges[index]), anchor="middle"))
    body.append(f'<path class="axis" d="M{_LEFT:.1f} {base:.1f}H{_WIDTH - _RIGHT:.1f}"/>')
    body.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "L2 norm of a row, log scale", anchor="middle"))
    if counts:
        offset = (math.log10(limit) - first_edge) / bin_width * width
        body += _draw_limit(bins_left + min(max(offset, 0.0), len(counts) * width), base, limit)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" '
        f'aria-label="{html.escape(title)}"><style>{_STYLE}</style>{"".join(body)}</svg>\n'
    )


class _Slot(NamedTuple):
    """A bar of the SVG."""

    label: str
    rows: int
    is_damaged: bool


def _tick_places(edges: Sequence[float]) -> list[int]:
    """The edges that get a label: about ten at most, whole powers of ten where there are several."""
    whole = [index for index, edge in enumerate(edges) if abs(edge - round(edge)) < 1e-6]
    places = whole if len(whole) > 2 else list(range(len(edges)))
    return places[:: math.ceil(len(places) / 10)] if len(edges) > 1 else []


def _draw_limit(x: float, base: float, limit: float) -> list[str]:
    """The line at the threshold, and its name on the side with more room."""
    is_right = x > _WIDTH / 2
    name = f"min_norm {format_norm(limit)}"
    return [
        f'<path class="limit" d="M{x:.1f} {_TOP - 8:.1f}V{base:.1f}"/>',
        _text(x + (-5 if is_right else 5), _TOP, name, kind="limit-name", anchor="end" if is_right else "start"),
    ]


def _edge(exponent: float) -> str:
    return format_norm(10**exponent)


def _share(count: int, largest: int, width: int) -> int:
    """Length of a bar: 0 for no row, at least 1 for one, `width` for the most."""
    return 0 if count == 0 else max(1, round(width * math.log1p(count) / math.log1p(largest)))


def _height(count: int, largest: int) -> float:
    """Height of a bar."""
    return (_HEIGHT - _TOP - _BOTTOM) * math.log1p(count) / math.log1p(largest)


def _text(x: float, y: float, text: str, *, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
