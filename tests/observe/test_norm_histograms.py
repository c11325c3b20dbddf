"""Histograms of norms in text and SVG."""

import xml.etree.ElementTree as ET

import pytest

from automodel.observe.norm_histograms import format_norm, norm_histogram_lines, norm_histogram_svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
SHAPE = {"counts": [70, 0, 0, 0, 1969], "first_edge": -6.0, "bin_width": 1.5, "zero": 9, "nonfinite": 1, "limit": 1e-3}


def draw(**changes):
    values = {**SHAPE, **changes}
    return norm_histogram_lines(values.pop("counts"), **values)


def test_norms_are_short():
    assert [format_norm(value) for value in (1.0666, 3.2e-8, 0.0, 1e-300, 2e30)] == [
        "1.07",
        "3.2e-8",
        "0",
        "1e-300",
        "2e+30",
    ]


def test_the_text_has_every_bin_and_the_threshold_between_them():
    lines = draw()
    assert [line.split("#")[0].split() for line in lines] == [
        ["norm", "rows"],
        ["0", "9"],
        ["1e-6", "..", "3.16e-5", "70"],
        ["3.16e-5", "..", "0.001", "0"],
        lines[4].split(),
        ["0.001", "..", "0.0316", "0"],
        ["0.0316", "..", "1", "0"],
        ["1", "..", "31.6", "1,969"],
        ["nan,", "inf", "1"],
    ]
    assert lines[4].strip("-") == " min_norm 0.001 "
    bars = [line.count("#") for line in lines]
    assert bars[7] == 40
    assert 0 < bars[8] < bars[1] < bars[2] < bars[7]
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize(("limit", "place"), [(1e-9, 2), (2e-6, 2), (0.5, 5), (1e9, 7)])
def test_the_threshold_stands_before_its_bin(limit, place):
    lines = draw(limit=limit)
    assert "min_norm" in lines[place]


def test_a_threshold_above_everything_ends_the_text():
    assert "min_norm" in draw(limit=1e9, nonfinite=0)[-1]


def test_nothing_but_zeros():
    assert len(draw(counts=[], nonfinite=0)) == 3


@pytest.mark.parametrize(
    "changes", [{}, {"counts": [3]}, {"counts": []}, {"zero": 0, "nonfinite": 0}, {"limit": 1e9}, {"counts": [5] * 60}]
)
def test_the_svg_is_well_formed_and_inside_its_frame(changes):
    values = {**SHAPE, **changes}
    root = ET.fromstring(
        norm_histogram_svg(values["counts"], title='a <b> & "c"', **{k: values[k] for k in SHAPE if k != "counts"})
    )
    assert root.tag == f"{NAMESPACE}svg"
    bars = list(root.iter(f"{NAMESPACE}rect"))
    shown = [count for count in (values["zero"], *values["counts"], values["nonfinite"]) if count]
    assert len(bars) == len(shown)
    for bar in bars:
        left, top, width, height = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
        assert left >= 56
        assert left + width <= 701
        assert top >= 61
        assert height > 0
    for text in root.iter(f"{NAMESPACE}text"):
        assert 0 <= float(text.get("x")) <= 720


def test_bars_under_the_threshold_look_damaged():
    values = {key: SHAPE[key] for key in SHAPE if key != "counts"}
    root = ET.fromstring(norm_histogram_svg(SHAPE["counts"], title="t", **values))
    kinds = [(bar.get("class"), bar[0].text) for bar in root.iter(f"{NAMESPACE}rect")]
    assert kinds == [
        ("bad", "0: 9 rows"),
        ("bad", "1e-6 to 3.16e-5: 70 rows"),
        ("good", "1 to 31.6: 1,969 rows"),
        ("bad", "nan, inf: 1 rows"),
    ]
