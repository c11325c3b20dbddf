import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import yaml

from automodel.config.descriptions import SettingDescription, describe_settings, spell_type, spell_yaml
from automodel.config.loader import ConfigNode, translate_value
from automodel.config.sections import setting


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int | None = setting(None, "how deep")


@dataclass(frozen=True, kw_only=True)
class Section:
    size: int = setting(help="how large")
    style: Literal["linear", "cosine"] = setting("linear", "which shape", off=("linear",))
    inner: Inner = setting(factory=Inner, help="more")
    names: tuple[str, ...] = setting(factory=lambda: ("a", "b"))


def test_every_key_is_described_and_those_of_a_sub_section_follow_it():
    assert list(describe_settings(Section)) == [
        SettingDescription(key="size", type="integer", default=None, required=True, help="how large"),
        SettingDescription(
            key="style", type="linear | cosine", default="linear", help="which shape", available=("linear",)
        ),
        SettingDescription(key="inner", type="mapping", default={}, help="more"),
        SettingDescription(key="inner.depth", type="integer or null", default=None, help="how deep"),
        SettingDescription(key="names", type="list of text", default=("a", "b"), help=""),
    ]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "integer"),
        (bool | None, "true or false or null"),
        (Literal["final", "every"] | bool, "final | every or true or false"),
        (str | None, "text or null"),
        (tuple[float, ...], "list of number"),
        (list[int], "list of integer"),
        (dict[str, Any], "mapping"),
        (Mapping[str, int], "mapping"),
        (ConfigNode | None, "mapping or null"),
        (Inner, "mapping"),
        (Any, "anything"),
        (inspect.Parameter.empty, "anything"),
        (SettingDescription, "mapping"),
        (Exception, "Exception"),
        ("a string", "a string"),
    ],
)
def test_types_in_words(hint, words):
    assert spell_type(hint) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (0.5, "0.5"),
        ("plain", "plain"),
        ("a/path.yaml", "a/path.yaml"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("#x", '"#x"'),
        ("line\nbreak", '"line\\nbreak"'),
        ("\u00e9t\u00e9", "\u00e9t\u00e9"),
        ((1, "a", None), "[1, a, null]"),
        ({"a": [1], "b c": True}, '{a: [1], "b c": true}'),
        (float("-inf"), "-.inf"),
        ([], "[]"),
        ({}, "{}"),
    ],
)
def test_values_as_yaml_on_one_line(value, text):
    assert spell_yaml(value) == text
    read = yaml.safe_load(text)
    assert read == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("value", ["yes", "off", "none", "10", "1e-3", "[1]", "~", "2024-01-01", "0x1f", "1_0", ".5"])
def test_a_text_that_reads_as_something_else_is_quoted(value):
    assert spell_yaml(value).startswith('"')
    assert yaml.safe_load(spell_yaml(value)) == value


def test_numbers_are_read_back():
    for value in (1e-5, 1e22, -3, 0.1):
        assert translate_value(yaml.safe_load(spell_yaml(value))) == value
