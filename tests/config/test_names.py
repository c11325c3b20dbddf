import pytest

from automodel.config.names import did_you_mean

KNOWN = ["embedding_row_repair", "optimizer", "step_scheduler", "model"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("embeding_row_repair", "embedding_row_repair"), ("optimiser", "optimizer"), ("modle", "model")],
)
def test_the_nearest_known_name_is_suggested(name, nearest):
    assert did_you_mean(name, KNOWN) == f" (did you mean {nearest!r}?)"


@pytest.mark.parametrize(("name", "known"), [("zzz", KNOWN), ("", KNOWN), ("model", [])])
def test_nothing_is_suggested_when_nothing_is_near(name, known):
    assert did_you_mean(name, known) == ""
