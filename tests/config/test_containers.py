import datetime

import pytest

from automodel.config.containers import ABSENT, find, find_key
from automodel.config.loader import ConfigNode

CONFIG = ConfigNode(
    {
        "ids": {5: "int", -1: "negative", 0.5: "float", True: "flag", None: "null", "7": "text", 7: "seven"},
        "days": {datetime.date(2024, 1, 2): "date"},
        "l": [[1, {"x": 2}]],
        "a.b": {"c.d": 3, "e": 4},
        "a": {"b": {"z": 5}},
        "literal": "{'k': [6]}",
    }
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ids.5", "int"),
        ("ids.-1", "negative"),
        ("ids.0.5", "float"),
        ("ids.true", "flag"),
        ("ids.True", "flag"),
        ("ids.none", "null"),
        ("ids.7", "text"),
        ("days.2024-01-02", "date"),
        ("l.0.1.x", 2),
        ("a.b.c.d", 3),
        ("a.b.e", 4),
        ("a.b.z", 5),
        ("literal.k.0", 6),
    ],
)
def test_a_dotted_path_finds_keys_of_every_type(path, value):
    assert CONFIG.get(path) == value
    assert path in CONFIG
    assert find(CONFIG, path) is not None


@pytest.mark.parametrize("path", ["ids.6", "ids.1", "ids.[1]", "l.1", "l.0.1.x.y", "a.b.q", "", "l.-1", [1], ("a",), 5])
def test_what_is_not_there_is_not_found(path):
    assert find(CONFIG, path) is None
    assert path not in CONFIG


def test_keys_are_given_as_they_are():
    ids = CONFIG["ids"]
    assert find_key(ids, "7") == "7"
    assert find_key(ids, 7) == 7
    assert type(find_key(ids, 7)) is int
    assert find_key([1, 2], "1") == 1
    assert find_key([1, 2], True) is ABSENT
    assert find_key("text", "0") is ABSENT
