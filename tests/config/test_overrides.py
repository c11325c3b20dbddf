import re
from dataclasses import dataclass

import pytest

from automodel.config.loader import ConfigNode
from automodel.config.overrides import Override, apply_overrides, parse_overrides
from automodel.config.sections import build_section, setting


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


@pytest.mark.parametrize("word", ["optimizer.lr=1e-3", "-optimizer.lr=1e-3"])
def test_a_word_that_only_lacks_its_dashes_is_spelt_right_in_the_message(word):
    with pytest.raises(ValueError, match=r"an override is written --optimizer\.lr=1e-3$"):
        parse_overrides([word])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--a.b", "2024"], "2024"),
        (["--a.b=1e3"], "1e3"),
        (["--a.b", "true"], "true"),
        (["--a.b", "x"], "x"),
        (["--a.b", "'10'"], "10"),
    ],
)
def test_a_text_field_gets_the_word_itself(words, text):
    @dataclass(frozen=True, kw_only=True)
    class Section:
        b: str = setting("")

    config = ConfigNode({})
    apply_overrides(config, parse_overrides(words))
    assert build_section(Section, config.a, "a").b == text


def test_an_override_is_the_origin_of_what_it_sets():
    config = ConfigNode({"a": {"b": 1, "c": [1, {"d": 2}]}})
    apply_overrides(config, parse_overrides(["--a.b=5", "--a.c.1.d=6", "--new.key=7"]))
    for path in ("a.b", "a.c.1.d", "new.key"):
        assert config.origin(path).kind == "override"
    assert config.origin("a.c.0").kind == "code"


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
        ("--leaf.x.y=1", "cannot set 'leaf.x.y': 'leaf' is 5, not a mapping"),
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
