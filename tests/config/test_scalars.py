import warnings

import pytest

from automodel.config.scalars import MAX_LITERAL_CHARACTERS, spell_value, translate_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("123", 123),
        ("-7", -7),
        ("3.14", 3.14),
        ("1e-5", 1e-5),
        ("true", True),
        ("True", True),
        ("false", False),
        ("False", False),
        ("none", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("(0.9, 0.95)", (0.9, 0.95)),
        ("{'a': 1}", {"a": 1}),
        ("'10'", "10"),
        ("1_000", 1000),
        ("True ", True),
        ("False  # no", False),
        ("b'x'", b"x"),
        ('rb"x"', b"x"),
        ("u'x'", "x"),
        ("set()", set()),
        ("Trueish", "Trueish"),
        ("don't", "don't"),
    ],
)
def test_strings_become_the_value_they_spell(text, value):
    translated = translate_value(text)
    assert translated == value
    assert type(translated) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "abc",
        "TRUE",
        "NONE",
        "null",
        "~",
        "nan",
        "inf",
        "1.2.3",
        "a.b.c",
        "...",
        "010",
        "[1,2",
        "f()",
        "1+x",
        "cosine",
        "me/Llama-3",
        "\0",
        "\ud800",
    ],
)
def test_other_strings_stay(text):
    assert translate_value(text) is text


@pytest.mark.parametrize("value", [5, 2.5, True, None, [1, "2"], {"a": "3"}, b"4", ("5",)])
def test_other_types_stay(value):
    assert translate_value(value) is value


def test_long_strings_are_never_parsed():
    longest = "1" * MAX_LITERAL_CHARACTERS
    assert translate_value(longest) == int(longest)
    assert translate_value(longest + "1") == longest + "1"


def test_strange_escapes_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert translate_value(r"'\d'") == r"\d"


@pytest.mark.parametrize("value", ["10", "none", "'10'", "[1]", "abc", "", "it's", 10, None, True, 0.5])
def test_spelling_a_value_gives_what_translates_to_it(value):
    translated = translate_value(spell_value(value))
    assert translated == value
    assert type(translated) is type(value)


def test_spelling_reaches_into_lists_and_mappings():
    assert spell_value(["10", "x", {"a": "true", "b": [False]}]) == ["'10'", "x", {"a": "'true'", "b": [False]}]
