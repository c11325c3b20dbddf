import pytest

from automodel.config.env import (
    Expansion,
    expand,
    has_placeholder,
    interpolate,
    map_placeholders,
    resolve_yaml_env_vars,
    user_modules_enabled,
)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("AM_HOST", "example.org")
    monkeypatch.setenv("am.dot.var", "dotted")
    monkeypatch.setenv("AM_EMPTY", "")
    monkeypatch.setenv("AM_DOLLAR", "pa$AM_HOST")
    monkeypatch.delenv("AM_MISSING", raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${AM_HOST}", "example.org"),
        ("${AM_HOST,other}", "example.org"),
        ("${AM_MISSING,other}", "other"),
        ("${am.dot.var}", "dotted"),
        ("$AM_HOST", "example.org"),
        ("$am.dot.var", "dotted"),
        ("${oc.env:AM_HOST}", "example.org"),
        ("${oc.env:AM_MISSING,other}", "other"),
        ("${AM_MISSING,a,b}", "a,b"),
        ("${AM_MISSING,}", ""),
        ("${AM_EMPTY,other}", ""),
        ("https://$AM_HOST/x?y=${AM_MISSING,1}", "https://example.org/x?y=1"),
        ("$AM_HOST.", "example.org."),
        ("$AM_HOST-1", "example.org-1"),
        ("${AM_DOLLAR}", "pa$AM_HOST"),
        ("${AM_MISSING,$AM_HOST}", "$AM_HOST"),
    ],
)
def test_placeholders_are_replaced_once(text, expected):
    assert has_placeholder(text)
    assert interpolate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "plain", "$5", "5$", "$", "$$", "${}", "${5}", "a $ b", "${ AM_HOST }", "%AM_HOST%"]
)
def test_other_dollar_signs_stay(text):
    assert not has_placeholder(text)
    assert interpolate(text) == text


@pytest.mark.parametrize("text", ["${AM_MISSING}", "$AM_MISSING", "${oc.env:AM_MISSING}", "x ${AM_HOST} $AM_MISSING"])
def test_a_missing_variable_is_named(text):
    with pytest.raises(KeyError, match="'AM_MISSING' is not set"):
        interpolate(text)


def test_nested_values_are_resolved_but_neither_keys_nor_targets():
    raw = {"a": ["$AM_HOST", {"$AM_HOST": "${AM_HOST}"}], "_target_": "$AM_MISSING.x", "n": 5, "none": None}
    assert resolve_yaml_env_vars(raw) == {
        "a": ["example.org", {"$AM_HOST": "example.org"}],
        "_target_": "$AM_MISSING.x",
        "n": 5,
        "none": None,
    }
    assert raw["a"][0] == "$AM_HOST"


@pytest.mark.parametrize(("text", "enabled"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_user_modules_switch(monkeypatch, text, enabled):
    monkeypatch.setenv("NEMO_ENABLE_USER_MODULES", text)
    assert user_modules_enabled() is enabled
    monkeypatch.delenv("NEMO_ENABLE_USER_MODULES")
    assert not user_modules_enabled()


def test_an_expansion_tells_what_it_took_from_where():
    assert expand("$AM_HOST-${AM_MISSING,1}-${AM_HOST}-${AM_MISSING,2}") == Expansion(
        text="example.org-1-example.org-2",
        environment=(("AM_HOST", "example.org"), ("AM_HOST", "example.org")),
        defaults=("AM_MISSING",),
    )
    assert expand("plain") == Expansion(text="plain")


def test_what_stands_around_placeholders_can_be_rewritten():
    text = "a${X,one}b$Y${Z}${oc.env:W,}"
    assert map_placeholders(text, literal=str.upper) == "A${X,one}B$Y${Z}${oc.env:W,}"
    marked = map_placeholders(text, literal=lambda _: ".", default=lambda name, default: f"{name}:{default}")
    assert marked == ".${X,X:one}.$Y${Z}${oc.env:W,W:}"
    assert map_placeholders("", literal=str.upper) == ""
