import dataclasses

import pytest

from automodel.config.notes import note


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    text: str


def test_an_error_keeps_its_class_and_text_and_gets_a_line():
    with pytest.raises(KeyError) as caught, note("outer"), note("inner"):
        raise KeyError("x")
    assert caught.value.args == ("x",)
    assert caught.value.__notes__ == ["inner", "outer"]


def test_the_same_line_is_added_once():
    with pytest.raises(ValueError, match="x") as caught, note("same"), note("same"):
        raise ValueError("x")
    assert caught.value.__notes__ == ["same"]


def test_an_interruption_is_no_error_of_the_recipe():
    with pytest.raises(KeyboardInterrupt) as caught, note("line"):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")


def test_an_error_that_allows_no_change_gets_its_line_all_the_same():
    with pytest.raises(Frozen) as caught, note("line"):
        raise Frozen("x")
    assert caught.value.text == "x"
    assert caught.value.__context__ is None
    assert caught.value.__notes__ == ["line"]
