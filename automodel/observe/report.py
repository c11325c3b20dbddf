"""The report of a run: one self-contained HTML page with its curves, timings, facts and configuration."""

from __future__ import annotations

import html
import re
import statistics
from typing import TYPE_CHECKING

from automodel.observe.atomic_file import replace_file
from automodel.observe.curves import column, finite_number, finite_values, smooth
from automodel.observe.formats import format_compact, format_duration, format_learning_rate
from automodel.observe.plots import Curve, ShareRow, curve_plot, duration_plot, share_plot
from automodel.observe.report_style import STYLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from automodel.observe.curves import Point
    from automodel.observe.timeline import Phase

__all__ = ["REPORT_VERSION", "write_report"]

REPORT_VERSION = 1
"""Version of the page, in its meta element automodel-report-version."""

_Columns = dict[str, "list[Point]"]
_COLUMNS = (
    *("loss", "grad_norm", "lr", "mem", "tps", "mfu", "epoch", "num_tokens_per_step", "num_label_tokens"),
    *("time_data", "time_forward", "time_backward", "time_optimizer", "time_step"),
)
_STEP_PHASES = (("data", 3), ("forward", 1), ("backward", 2), ("optimizer", 4))
_OTHER_COLOR = 5
_SMOOTH_FROM = 20
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_report(
    path: Path,
    *,
    title: str,
    training: Sequence[Mapping[str, object]],
    validation: Sequence[Mapping[str, object]],
    startup: Sequence[Phase],
    config_text: str,
    environment: Mapping[str, str] | None,
    sample: str | None,
    status: str,
    facts: Mapping[str, str] | None,
) -> None:
    """Write the page to `path`, in one step: a reader sees the old page or the new one.

    The page loads nothing from anywhere and runs no script. Every text is escaped. Numbers that are missing or not
    finite are left out of the plots.

    Args:
        path: the file to write.
        title: name of the run.
        training: rows as `metrics.read_rows` gives them from training.jsonl.
        validation: rows from validation.jsonl; step -1 is the validation before training.
        startup: the phases of the start, in order.
        config_text: the configuration as YAML, secrets already redacted.
        environment: versions, devices and the like; left out when None.
        sample: a completion that the model wrote; left out when None.
        status: how the run stands, in a word or two: "finished", "stopped by SIGTERM".
        facts: rows for the table of facts (parameters, tokens per step), in order; they come before the counted ones.

    Raises:
        OSError: the page cannot be written; an older page is then untouched.
    """
    columns = {key: column(training, key) for key in _COLUMNS}
    facts_section = _facts_section(columns, facts)
    if training:
        skipped = [finite_number(row.get("step")) or 0.0 for row in training if row.get("skipped") is True]
        body = [
            _header(title, status, training),
            _key_figures(columns, validation, startup),
            f'<div class="row lead">{_loss_figure(columns, validation, skipped=skipped)}{facts_section}</div>',
            f'<div class="row">{"".join(_step_figures(columns))}</div>',
            f'<div class="row">{_phase_figure(columns)}{_startup_figure(startup)}</div>',
        ]
    else:
        body = [
            _header(title, status, training),
            '<p class="empty lone">No training step has been recorded yet.</p>',
            f'<div class="row">{_startup_figure(startup)}{facts_section}</div>',
        ]
    if sample is not None:
        body.append(f'<section><h2>Sample completion</h2><pre class="wrap">{_escape(sample)}</pre></section>')
    body.append(f'<section class="long"><h2>Configuration</h2><pre>{_escape(config_text)}</pre></section>')
    if environment:
        table = _table(environment, kind="wide")
        body.append(f'<section class="long"><h2>Environment</h2>{table}</section>')
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="automodel-report-version" content="{REPORT_VERSION}">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{_escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
    replace_file(path, page.encode())


def _header(title: str, status: str, training: Sequence[Mapping[str, object]]) -> str:
    """The run's name, how far it came and how it stands."""
    parts = []
    if training:
        parts.append(f"{len(training):,} step{'' if len(training) == 1 else 's'}")
        timestamp = training[-1].get("timestamp")
        if isinstance(timestamp, str):
            parts.append(f"last one {timestamp[:19].replace('T', ' ')} UTC")
    return (
        f"<header><h1>{_escape(title)}</h1><p>{_escape(', '.join(parts))}</p>"
        f'<p class="status">{_escape(status)}</p></header>'
    )


def _key_figures(
    columns: _Columns,
    validation: Sequence[Mapping[str, object]],
    startup: Sequence[Phase],
) -> str:
    """The handful of numbers that one looks for first; those without data are left out."""
    figures: list[tuple[str, str, str]] = []
    losses = finite_values(columns["loss"])
    if losses:
        figures.append(("Training loss", f"{losses[-1]:.3f}", f"first step {losses[0]:.3f}"))
    validations = finite_values(column(validation, "val_loss"))
    if validations:
        first = validations[0]
        note = f"first {first:.3f}"
        if first > 0 and len(validations) > 1:
            note = f"{validations[-1] / first:.0%} of the first, {first:.3f}"
        figures.append(("Validation loss", f"{validations[-1]:.3f}", note))
    speeds = finite_values(columns["tps"])
    if speeds:
        figures.append(("Tokens per second", format_compact(statistics.median(speeds)), "median of the steps"))
    tokens = finite_values(columns["num_tokens_per_step"])
    if tokens:
        figures.append(("Tokens", format_compact(sum(tokens)), f"{tokens[-1]:,.0f} per step"))
    seconds = finite_values(columns["time_step"])
    if seconds:
        start = f"start-up {format_duration(sum(phase.seconds for phase in startup))}" if startup else "all of them"
        figures.append(("Time in steps", format_duration(sum(seconds)), start))
    memory = finite_values(columns["mem"])
    if memory:
        figures.append(("Memory", f"{max(memory):.2f} GiB", "peak"))
    items = (
        f"<div><dt>{_escape(name)}</dt><dd><strong>{_escape(value)}</strong><span>{_escape(note)}</span></dd></div>"
        for name, value, note in figures
    )
    return f'<dl class="figures">{"".join(items)}</dl>'


def _loss_figure(columns: _Columns, validation: Sequence[Mapping[str, object]], *, skipped: Sequence[float]) -> str:
    """Training and validation loss over the steps."""
    losses = columns["loss"]
    validations = [(step, value) for step, value in column(validation, "val_loss") if value is not None]
    smoothed = len(losses) >= _SMOOTH_FROM
    curves = [Curve(label="training", points=losses, color=1, style="faint" if smoothed else "line")]
    legend = [("bg1 thin pale" if smoothed else "bg1 thin", "training, each step")]
    if smoothed:
        span = max(5, len(losses) // 30) | 1
        curves.append(Curve(label="training, smoothed", points=smooth(losses, span=span), color=1))
        legend.append(("bg1 thin", f"mean over {span} steps"))
    if validations:
        curves.append(Curve(label="validation", points=validations, color=2, style="marked"))
        legend.append(("bg2 round", "validation"))
    if skipped:
        legend.append(("bg2 thin", f"{len(skipped):,} skipped step{'' if len(skipped) == 1 else 's'}"))
    plot = curve_plot(
        curves,
        title="Training and validation loss over the steps",
        unit="nats per token",
        may_be_log=True,
        marks=skipped[:200],
        large=True,
    )
    return _figure("Loss", _legend(legend) if plot else "", plot)


def _step_figures(columns: _Columns) -> list[str]:
    """The small plots over the steps: speed, gradient norm, learning rate, memory."""
    return [
        _step_figure(columns, "tps", heading="Speed", unit="tokens per second", color=3, describe=_describe_speed),
        _step_figure(
            columns,
            "grad_norm",
            heading="Gradient norm",
            unit="norm before clipping",
            color=4,
            describe=_describe_norm,
            may_be_log=True,
        ),
        _step_figure(columns, "lr", heading="Learning rate", unit="lr", color=1, describe=_describe_rate),
        _step_figure(columns, "mem", heading="Memory", unit="GiB", color=5, describe=_describe_memory),
    ]


def _step_figure(
    columns: _Columns,
    key: str,
    *,
    heading: str,
    unit: str,
    color: int,
    describe: Callable[[list[float]], str],
    may_be_log: bool = False,
) -> str:
    """One value of the rows over the steps, with a line that sums it up."""
    points = columns[key]
    values = finite_values(points)
    curve = Curve(label=heading, points=points, color=color)
    title = f"{heading} over the steps"
    plot = curve_plot([curve], title=title, unit=unit, from_zero=not may_be_log, may_be_log=may_be_log)
    return _figure(heading, f'<p class="note">{_escape(describe(values))}</p>' if values else "", plot)


def _describe_speed(values: list[float]) -> str:
    median, lowest = format_compact(statistics.median(values)), format_compact(min(values))
    return f"median {median}, slowest step {lowest}, fastest {format_compact(max(values))}"


def _describe_norm(values: list[float]) -> str:
    return f"median {statistics.median(values):.3g}, largest {max(values):.3g}, last {values[-1]:.3g}"


def _describe_rate(values: list[float]) -> str:
    return f"peak {format_learning_rate(max(values))}, last {format_learning_rate(values[-1])}"


def _describe_memory(values: list[float]) -> str:
    return f"peak {max(values):.2f} GiB"


def _phase_figure(columns: _Columns) -> str:
    """The shares of the phases in the first step, the later ones together and the slowest of them."""
    steps = columns["time_step"]
    timed = [index for index, (_, seconds) in enumerate(steps) if seconds]
    if not timed:
        return _figure("Time in a step", "", "")
    first, *later = timed
    rows = [ShareRow(label=f"first step ({steps[first][0]:.0f})", parts=_mean_parts(columns, [first]))]
    if later:
        rows.append(ShareRow(label="later steps, mean", parts=_mean_parts(columns, later)))
    if later[1:]:
        slowest = max(later, key=lambda index: steps[index][1] or 0.0)
        label = f"slowest later step ({steps[slowest][0]:.0f})"
        rows.append(ShareRow(label=label, parts=_mean_parts(columns, [slowest])))
    legend = _legend([(f"bg{color}", name) for name, _, color in rows[0].parts])
    return _figure("Time in a step", legend, share_plot(rows, title="Shares of the phases in the time of a step"))


def _mean_parts(columns: _Columns, places: Sequence[int]) -> list[tuple[str, float, int]]:
    """The phases as (name, mean seconds, colour) over the steps at some places, the rest of the step last."""

    def mean(key: str) -> float:
        points = columns[key]
        return max(0.0, statistics.fmean(points[place][1] or 0.0 for place in places))

    parts = [(name, mean(f"time_{name}"), color) for name, color in _STEP_PHASES]
    rest = mean("time_step") - sum(seconds for _, seconds, _ in parts)
    return [*parts, ("other", max(0.0, rest), _OTHER_COLOR)]


def _startup_figure(startup: Sequence[Phase]) -> str:
    """What the time before the first step went into."""
    note = f'<p class="note">{format_duration(sum(phase.seconds for phase in startup))} in all</p>' if startup else ""
    return _figure("Start-up", note, duration_plot(startup, title="Seconds of each phase of the start-up"))


def _facts_section(columns: _Columns, facts: Mapping[str, str] | None) -> str:
    """The table of facts: the given ones, then those counted from the rows."""
    rows = dict(facts or {})
    labels = finite_values(columns["num_label_tokens"])
    if labels:
        rows.setdefault("Label tokens", f"{sum(labels):,.0f}")
    epochs = finite_values(columns["epoch"])
    if epochs:
        rows.setdefault("Epochs begun", f"{max(epochs) + 1:.0f}")
    utilization = finite_values(columns["mfu"])
    if utilization:
        rows.setdefault("Model FLOPs utilization", f"{statistics.median(utilization):.1f} % (median)")
    return f"<section><h2>Facts</h2>{_table(rows)}</section>" if rows else ""


def _figure(heading: str, caption: str, plot: str) -> str:
    """A heading, a line or a legend, and a plot or a word that there is nothing to draw."""
    drawing = plot or '<p class="empty">Nothing recorded.</p>'
    return f"<figure><figcaption><h2>{_escape(heading)}</h2>{caption}</figcaption>{drawing}</figure>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """A legend; each entry is the classes of its swatch and its label."""
    items = "".join(f'<li><i class="{kind}"></i>{_escape(label)}</li>' for kind, label in entries)
    return f'<ul class="legend">{items}</ul>'


def _table(rows: Mapping[str, str], *, kind: str = "facts") -> str:
    """Names and values."""
    lines = (
        f'<tr><th scope="row">{_escape(name)}</th><td>{_escape(str(value))}</td></tr>' for name, value in rows.items()
    )
    return f'<table class="{kind}">{"".join(lines)}</table>'


def _escape(text: str) -> str:
    """`text` for HTML: markup escaped, characters that a page must not hold replaced."""
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
