import re

import pytest

from automodel.config.loader import ConfigNode
from automodel.config.overrides import Override, apply_overrides, parse_overrides


def overridden(raw, *words):
    config = ConfigNode(raw)
    apply_overrides(config, parse_overrides(words))
    return config.to_dict()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--a.b", "5"], 5),
        (["--a.b=5"], 5),
        (["--a.b", "-5"], -5),
        (["--a.b=-0.5"], -0.5),
        (["--a.b", "-1e-3"], -1e-3),
        (["--a.b"], True),
        (["--a.b", "false"], False),
        (["--a.b", "null"], None),
        (["--a.b=~"], None),
        (["--a.b", "None"], None),
        (["--a.b", "text"], "text"),
        (["--a.b", "two words"], "two words"),
        (["--a.b="], ""),
        (["--a.b", ""], ""),
        (["--a.b=x=y"], "x=y"),
        (["--a.b=--c"], "--c"),
        (["--a.b", "[1, 2]"], [1, 2]),
        (["--a.b", "{'c': 1}"], {"c": 1}),
        (["--a.b", "'10'"], "10"),
        (["--a.b", '"none"'], "none"),
    ],
)
def test_one_override(words, value):
    assert parse_overrides(words) == [Override(path="a.b", value=value)]
    result = overridden({"a": {"b": "old", "c": "kept"}}, *words)["a"]
    assert result == {"b": value, "c": "kept"}
    assert type(result["b"]) is type(value)


def test_quoted_strings_inside_lists_stay_strings():
    assert overridden({}, "--a", "['1', 'x', 2]") == {"a": ["1", "x", 2]}


def test_several_overrides_and_flags_the_later_wins():
    words = ["--a", "1", "--flag", "--b.c=2", "--a", "3", "--other-flag"]
    assert [(o.path, o.value) for o in parse_overrides(words)] == [
        ("a", 1),
        ("flag", True),
        ("b.c", 2),
        ("a", 3),
        ("other-flag", True),
    ]
    assert overridden({"a": 0}, *words) == {"a": 3, "flag": True, "b": {"c": 2}, "other-flag": True}


def test_no_words_no_overrides():
    assert parse_overrides([]) == []


@pytest.mark.parametrize("word", ["stray", "-x", "--", "--=5", "---a", "a=5", "=", "-5"])
def test_a_stray_word_is_named(word):
    for words in ([word], ["--a=1", word]):
        with pytest.raises(ValueError, match=f"unexpected argument {re.escape(repr(word))}"):
            parse_overrides(words)


def test_list_elements_new_mappings_and_targets():
    raw = {"l": [{"x": 1}, 2], "model": {"_target_": "a.b"}, "empty": None}
    words = ["--l.0.x", "9", "--l.1=3", "--model._target_", "builtins.dict", "--new.deep.key", "v", "--empty.x", "1"]
    assert overridden(raw, *words) == {
        "l": [{"x": 9}, 3],
        "model": {"_target_": "builtins.dict"},
        "empty": {"x": 1},
        "new": {"deep": {"key": "v"}},
    }


def test_an_environment_placeholder_is_resolved(monkeypatch):
    monkeypatch.setenv("AM_PORT", "80")
    config = ConfigNode({})
    apply_overrides(config, parse_overrides(["--port", "${AM_PORT}"]))
    assert config.port == 80
    assert config.to_yaml_dict() == {"port": "${AM_PORT}"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--leaf.x.y=1", "cannot set 'leaf.x.y': the way leads through 'leaf', which is 5, not a mapping"),
        ("--leaf.x=1", "cannot set 'leaf.x': 'leaf' is 5, not a mapping"),
        ("--l.7=1", "cannot set 'l.7': '7' is no position in a list of 2"),
        ("--l.7.x=1", "cannot set 'l.7.x': '7' is no position in a list of 2"),
        ("--l.-1=1", "'-1' is no position"),
        ("--l.x=1", "'x' is no position"),
        ("--l.\u00b2=1", "is no position"),
        ("--a..b=1", "'a..b' is not a dotted path"),
        ("--a.=1", "'a.' is not a dotted path"),
    ],
)
def test_a_path_that_leads_nowhere_is_named_and_changes_nothing(word, message):
    config = ConfigNode({"leaf": 5, "l": [1, 2]})
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_overrides(config, parse_overrides([word]))
    assert config.to_dict() == {"leaf": 5, "l": [1, 2]}
