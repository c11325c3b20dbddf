"""The report page: well formed, self-contained, escaped, complete."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from automodel.observe.metrics import TrainingRow, ValidationRow
from automodel.observe.report import REPORT_VERSION, write_report
from automodel.observe.timeline import Phase

VOID = {"meta", "link", "br", "hr", "img", "input"}
ROW = TrainingRow(
    step=0,
    epoch=0,
    timestamp="2026-01-02T03:04:05.678+00:00",
    loss=8.0,
    grad_norm=2.0,
    lr=3e-4,
    mem=0.5,
    tps=7160.0,
    tps_per_gpu=7160.0,
    mfu=None,
    num_tokens_per_step=2048,
    num_label_tokens=2040,
    time_data=0.02,
    time_forward=0.1,
    time_backward=0.2,
    time_optimizer=0.03,
    time_step=0.4,
)
VALIDATION = ValidationRow(
    step=-1,
    epoch=0,
    timestamp="",
    val_loss=8.5,
    lr=0.0,
    mem=0.0,
    tps=0.0,
    num_label_tokens=100_352,
    time_validation=4.5,
)


class Page(HTMLParser):
    """A parsed page: refuses elements that are not closed in order, collects text, attributes and charts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def training_rows(count: int) -> list[dict[str, object]]:
    return [
        dataclasses.asdict(dataclasses.replace(ROW, step=step, loss=8.0 - 4.0 * step / count)) for step in range(count)
    ]


def validation_rows() -> list[dict[str, object]]:
    return [
        dataclasses.asdict(dataclasses.replace(VALIDATION, step=step, val_loss=loss))
        for step, loss in ((-1, 8.5), (49, 6.0), (99, 4.25))
    ]


@pytest.fixture
def report(tmp_path):
    """Writes a report of a run of 100 steps, with whatever the test changes; returns its text and the parsed page."""

    def write(**changes: object) -> tuple[str, Page]:
        arguments = {
            "title": "hybrid_tiny",
            "training": training_rows(100),
            "validation": validation_rows(),
            "startup": [Phase("imports", 4.0), Phase("model", 1.5)],
            "config_text": "model:\n  hidden_size: 256\n",
            "environment": {"versions: torch": "2.13.0"},
            "sample": "def run():",
            "status": "finished",
            "facts": {"Parameters": "2,814,976"},
        }
        path = tmp_path / "report.html"
        write_report(path, **(arguments | changes))
        text = path.read_text(encoding="utf-8")
        return text, Page(text)

    return write


def test_the_page_shows_everything_that_a_run_leaves(report):
    _, page = report()
    for expected in (
        *("hybrid_tiny", "finished", "100 steps, last one 2026-01-02 03:04:05 UTC", "Loss", "Speed", "Gradient norm"),
        *("Learning rate", "Memory", "Time in a step", "Start-up", "imports", "4.0s", "Sample completion"),
        *("def run():", "hidden_size: 256", "versions: torch", "2.13.0", "Parameters", "2,814,976", "2,048 per step"),
        *("4.040", "4.250", "50% of the first, 8.500", "7.16k", "nats per token", "tokens per second", "GiB", "step"),
    ):
        assert expected in page.text, expected
    version = [meta["content"] for meta in page.all("meta") if meta.get("name") == "automodel-report-version"]
    assert version == [str(REPORT_VERSION)]


def test_every_plot_scales_and_has_a_role_and_a_title(report):
    text, page = report()
    plots = page.all("svg")
    assert len(plots) == 7
    assert all(plot["role"] == "img" and plot["aria-label"] and "viewbox" in plot for plot in plots)
    assert len(re.findall(r"<svg [^>]*><title>[^<]+</title>", text)) == 7


def test_the_page_is_self_contained_and_runs_nothing(report):
    text, page = report()
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text


EVIL = "</pre><script>alert('x')</script> & \"quoted\" <img src=https://evil.example/x onerror=y>"


@pytest.mark.parametrize("place", ["title", "status", "config_text", "sample"])
def test_texts_are_escaped(report, place):
    _, page = report(**{place: EVIL})
    assert EVIL in page.text
    assert not page.all("script")
    assert not page.all("img")


def test_names_and_values_of_tables_and_phases_are_escaped(report):
    _, page = report(environment={EVIL: EVIL}, facts={EVIL: EVIL}, startup=[Phase(EVIL, 1.0)])
    assert page.text.count(EVIL) == 5
    assert not page.all("script")
    assert not page.all("img")


def test_rows_cannot_inject_markup(report):
    rows = training_rows(3)
    rows[-1] |= {"timestamp": EVIL, "loss": EVIL, "step": EVIL}
    _, page = report(training=rows)
    assert not page.all("script")
    assert not page.all("img")


def test_characters_that_a_page_cannot_hold_are_replaced(report):
    _, page = report(sample="a\x00b\x1b[0m\ud800c\n\td")
    assert "a\ufffdb\ufffd[0m\ufffdc\n\td" in page.text


def test_a_run_without_rows_says_so(report):
    _, page = report(training=[], validation=[], startup=[], environment=None, sample=None, facts=None)
    assert "No training step has been recorded yet." in page.text
    assert "hidden_size: 256" in page.text
    assert page.all("svg") == []
    assert "Environment" not in page.text
    assert "Sample completion" not in page.text


def test_one_row_and_missing_numbers_are_drawn(report):
    row = training_rows(1)[0] | {"loss": None, "grad_norm": float("nan")}
    del row["mem"]
    _, page = report(training=[row], validation=[])
    assert page.text.count("Nothing recorded.") == 3
    assert "nan" not in page.text


def test_rows_of_the_reference_system_are_drawn(report):
    rows = [{"step": step, "loss": 5.0 - step, "lr": 1e-4, "tps": 100.0} for step in range(3)]
    _, page = report(training=rows, validation=[{"step": 2, "val_loss": 3.5}])
    assert "3.500" in page.text


def test_long_runs_are_thinned(report):
    text, _ = report(training=training_rows(4_000))
    paths = re.findall(r'<path class="curve[^"]*" d="([^"]*)"', text)
    assert len(paths) == 7
    assert max(len(re.findall(r"[\d.]+ [\d.]+", path)) for path in paths) == 1000
    assert len(text) < 250_000


def test_a_curve_breaks_where_a_value_is_missing_and_skipped_steps_are_marked(report):
    rows = training_rows(10)
    rows[4] |= {"loss": None, "skipped": True}
    text, page = report(training=rows, validation=[])
    loss = next(path for path in re.findall(r'<path class="curve[^"]*" d="([^"]*)"', text))
    assert loss.count("M") == 2
    assert len([path for path in page.all("path") if path.get("class") == "mark"]) == 1
    assert "1 skipped step" in page.text


def test_an_exploding_loss_gets_a_log_axis(report):
    rows = training_rows(10)
    rows[5]["loss"] = 1e6
    _, page = report(training=rows)
    assert "nats per token, log scale" in page.text
    assert "nats per token, log scale" not in report()[1].text


def test_the_bars_of_a_step_add_up(report):
    text, page = report()
    tips = [tip for tip in page.texts if tip.startswith(("data:", "forward:", "backward:", "optimizer:", "other:"))]
    assert "forward: 0.10s (25%)" in tips
    assert "backward: 0.20s (50%)" in tips
    assert any(tip.startswith("other: 0.05s") for tip in tips)
    bars = re.findall(r'<rect class="fill\d" x="([\d.]+)" y="24.0" width="([\d.]+)"', text)
    assert float(bars[-1][0]) + float(bars[-1][1]) == pytest.approx(520.0, abs=0.2)


def test_the_page_replaces_an_older_one_and_leaves_nothing_else(report, tmp_path):
    report(status="running")
    text, _ = report(status="finished")
    assert "running" not in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
