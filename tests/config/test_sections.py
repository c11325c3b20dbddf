import functools
import re
import traceback
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.config.sections import NotAvailableYetError, build_section, check_arguments, refuse, setting


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = setting(1, "how deep")


@dataclass(frozen=True, kw_only=True)
class NotBuilt:
    enabled: bool = setting(False, off=(False,))


@dataclass(frozen=True, kw_only=True)
class Section:
    size: int = setting(help="required")
    rate: float = setting(0.5)
    flag: bool = setting(False)
    name: str | None = setting(None)
    style: Literal["linear", "cosine", 1] = setting("linear")
    names: tuple[str, ...] = setting(())
    inner: Inner = setting(factory=Inner)
    either: int | Literal["auto"] = setting("auto")
    maybe: Inner | None = setting(None)
    several: int | NotBuilt = setting(0)
    anything: Any = setting(None)
    node: ConfigNode | None = setting(None)
    tp_size: int = setting(1, off=(1, 0))
    fused: bool | None = setting(None, off=(None, False))

    def __post_init__(self):
        if self.size < 1:
            raise refuse("sec.size", self.size, "positive")


def build(**values):
    return build_section(Section, ConfigNode({"size": 3} | values, path="sec"), "sec")


def test_defaults_and_plain_values():
    section = build()
    assert section == Section(size=3)
    assert section.inner == Inner(depth=1)
    assert build(rate=0.25, flag=True, name="x", names=["a", "b"], inner={"depth": 4}, either=5) == Section(
        size=3, rate=0.25, flag=True, name="x", names=("a", "b"), inner=Inner(depth=4), either=5
    )


def test_an_absent_section_is_its_defaults():
    assert build_section(Inner, None, "sec.inner") == Inner()
    assert build_section(Inner, {}, "sec.inner") == Inner()
    assert build_section(Inner, {"depth": 2}, "sec.inner") == Inner(depth=2)
    assert build(maybe=None).maybe is None


def test_a_whole_number_is_a_number():
    rate = build(rate=2).rate
    assert rate == 2.0
    assert type(rate) is float


def test_strings_are_typed_before_they_are_checked():
    assert build(rate="1e-5").rate == 1e-5


def test_a_target_is_passed_over_without_being_imported():
    node = ConfigNode({"_target_": "am_absent.manager", "depth": 2})
    assert build_section(Inner, node, "sec.inner") == Inner(depth=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sizes": 1}, "unknown key sec.sizes (did you mean 'size'?)"),
        ({"zzzz": 1}, "unknown key sec.zzzz"),
        ({5: 1}, "unknown key sec.5"),
        ({"size": "x"}, "sec.size must be an integer, got 'x'"),
        ({"size": 2.5}, "sec.size must be an integer, got 2.5"),
        ({"size": True}, "sec.size must be an integer, got True"),
        ({"size": None}, "sec.size must be an integer, got None"),
        ({"size": 0}, "sec.size must be positive, got 0"),
        ({"rate": True}, "sec.rate must be a number, got True"),
        ({"rate": "fast"}, "sec.rate must be a number, got 'fast'"),
        ({"flag": 1}, "sec.flag must be true or false, got 1"),
        ({"flag": "yes"}, "sec.flag must be true or false, got 'yes'"),
        ({"name": 5}, "sec.name must be a text, got 5"),
        ({"style": "cubic"}, "sec.style must be one of 'linear', 'cosine', 1, got 'cubic'"),
        ({"style": True}, "sec.style must be one of 'linear', 'cosine', 1, got True"),
        ({"names": "a"}, "sec.names must be a list, got 'a'"),
        ({"names": ["a", 5]}, "sec.names.1 must be a text, got 5"),
        ({"inner": {"dept": 1}}, "unknown key sec.inner.dept (did you mean 'depth'?)"),
        ({"inner": {"depth": "x"}}, "sec.inner.depth must be an integer, got 'x'"),
        ({"maybe": {"depth": None}}, "sec.maybe.depth must be an integer, got None"),
        ({"either": 2.5}, "sec.either must be an integer, or one of 'auto', got 2.5"),
        ({"node": 5}, "sec.node must be a mapping, got 5"),
    ],
)
def test_a_refused_value_is_named_with_its_place(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_section(Section, ConfigNode({"size": 3} | values), "sec")


def test_a_missing_required_key_is_named():
    with pytest.raises(ValueError, match=r"^sec\.size is required$"):
        build_section(Section, ConfigNode({"rate": 1.0}), "sec")


@pytest.mark.parametrize("value", [5, "text", [1], False])
def test_a_section_that_is_no_mapping_is_a_type_error(value):
    with pytest.raises(TypeError, match=re.escape(f"sec.inner must be a mapping, got {value!r}")):
        build(inner=value)


@pytest.mark.parametrize(("key", "value"), [("tp_size", 1), ("tp_size", 0), ("fused", None), ("fused", False)])
def test_what_is_not_built_yet_may_be_switched_off(key, value):
    assert getattr(build(**{key: value}), key) == value


@pytest.mark.parametrize(("key", "value"), [("tp_size", 2), ("fused", True)])
def test_what_is_not_built_yet_cannot_be_switched_on(key, value):
    with pytest.raises(NotAvailableYetError, match=f"^sec.{key}: {value} is not available yet$") as caught:
        build(**{key: value})
    assert isinstance(caught.value, ValueError)


def test_what_is_not_built_yet_says_so_inside_a_choice_of_types():
    assert build(several=2).several == 2
    assert build(several={"enabled": False}).several == NotBuilt()
    with pytest.raises(NotAvailableYetError, match=r"^sec\.several\.enabled: True is not available yet$"):
        build(several={"enabled": True})


def test_a_mistyped_value_of_what_is_not_built_yet_is_a_mistake():
    with pytest.raises(ValueError, match=r"^sec\.tp_size must be an integer, got True$"):
        build(tp_size=True)


def test_values_from_the_environment_fit_every_type(monkeypatch):
    monkeypatch.setenv("AM_STYLE", "cosine")
    monkeypatch.setenv("AM_SIZE", "7")
    section = build(size="${AM_SIZE}", style="${AM_STYLE}", name="${AM_STYLE}", names=["${AM_STYLE}"])
    assert (section.size, section.style, section.name, section.names) == (7, "cosine", "cosine", ("cosine",))
    assert type(section.style) is type(section.name) is type(section.names[0]) is str


@dataclass(frozen=True, kw_only=True)
class Foreign:
    depht: int | None = setting(None, "passed over")
    tree: str | None = setting(None, off=(None, "oak"))


def test_keys_of_a_second_class_are_checked_and_passed_over():
    values = {"depth": 3, "depht": 5, "tree": "oak"}
    assert build_section(Inner, values, "sec", also=Foreign) == Inner(depth=3)
    with pytest.raises(NotAvailableYetError, match=r"^sec\.tree: 'elm' is not available yet$"):
        build_section(Inner, {"tree": "elm"}, "sec", also=Foreign)
    with pytest.raises(ValueError, match=r"^sec\.tree must be a text, got 5$"):
        build_section(Inner, {"tree": 5}, "sec", also=Foreign)
    with pytest.raises(ValueError, match=r"^unknown key sec\.tre \(did you mean 'tree'\?\)$"):
        build_section(Inner, {"tre": "oak"}, "sec", also=Foreign)


@dataclass(frozen=True, kw_only=True)
class Switched:
    enabled: bool = setting(True)
    fast: bool = setting(False, off=(False,))


def test_what_is_not_built_yet_may_have_any_value_in_a_section_that_is_switched_off():
    assert build_section(Switched, {"enabled": False, "fast": True}, "sec") == Switched(enabled=False, fast=True)
    for values in ({"enabled": True, "fast": True}, {"fast": True}):
        with pytest.raises(NotAvailableYetError):
            build_section(Switched, values, "sec")
    with pytest.raises(ValueError, match=r"sec\.fast must be true or false, got 3"):
        build_section(Switched, {"enabled": False, "fast": 3}, "sec")


def load(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return load_yaml_config(file)


@pytest.mark.parametrize(("written", "text"), [('"2024"', "2024"), ("'1e3'", "1e3"), ('"true"', "true")])
def test_a_text_that_looks_like_a_number_is_a_text_where_one_is_asked_for(written, text, tmp_path):
    config = load(tmp_path, f"sec: {{size: 3, name: {written}, names: [a, {written}]}}")
    section = build_section(Section, config.sec, "sec")
    assert (section.name, section.names) == (text, ("a", text))


def test_an_unquoted_number_is_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"^sec\.name must be a text, got 2024"):
        build_section(Section, load(tmp_path, "sec: {size: 3, name: 2024}").sec, "sec")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sec:\n  size: 3\n  rate: fast\n", 3),
        ("sec:\n  rate: 1\n  size: 0\n", 3),
        ("sec:\n  size: 3\n  ratee: 1\n", 3),
        ("sec:\n  size: 3\n  inner:\n    depth: x\n", 4),
        ("sec:\n  size: 3\n  inner:\n    dept: 1\n", 4),
        ("sec:\n  size: 3\n  names:\n    - a\n    - {b: 1}\n", 3),
        ("sec:\n  size: 3\n  tp_size: 2\n", 3),
    ],
)
def test_an_error_notes_the_line_of_the_recipe(text, line, tmp_path):
    with pytest.raises(ValueError, match="sec") as caught:
        build_section(Section, load(tmp_path, text).sec, "sec")
    assert caught.value.__notes__ == [f"in {tmp_path / 'recipe.yaml'}:{line}"]


@pytest.mark.parametrize(
    ("key", "secret"),
    [("rate", "swordfish"), ("size", "-74189"), ("flag", "74189"), ("tp_size", "74189"), ("style", "74189.5")],
)
def test_a_value_of_the_environment_is_never_in_an_error(key, secret, tmp_path, monkeypatch):
    monkeypatch.setenv("AM_SECRET", secret)
    config = load(tmp_path, f"sec:\n  {key}: ${{AM_SECRET}}\n" + ("" if key == "size" else "  size: 3\n"))
    with pytest.raises(ValueError, match="AM_SECRET") as caught:
        build_section(Section, config.sec, "sec")
    assert secret not in "".join(traceback.format_exception(caught.value))


def takes_two(first, *, second=2):
    return first, second


def takes_any(first, **options):
    return first, options


@pytest.fixture
def checked():
    """Check a mapping whose targets are functions of this module."""
    names = {"two": takes_two, "any": takes_any, "partial": functools.partial(takes_two, second=3)}

    def named(value):
        if isinstance(value, dict):
            return {k: names[v] if k == "_target_" else named(v) for k, v in value.items()}
        return [named(item) for item in value] if isinstance(value, list) else value

    def check(raw, **options):
        check_arguments(ConfigNode(named(raw), path="model"), **options)

    return check


def test_arguments_that_fit(checked):
    checked({"_target_": "two", "first": 1})
    checked({"_target_": "two", "first": 1, "second": 5})
    checked({"_target_": "any", "first": 1, "whatever": {"x": 1}})
    checked({"_target_": "two"}, provided=("first",))
    checked({"_target_": "two", "first": {"_target_": "any", "first": 1, "more": 2}})
    checked({"_target_": "partial", "first": 1})
    checked({"_target_": "any", "first": 1, "collate_fn": {"_target_": "two", "first": 3}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"_target_": "two", "first": 1, "secnd": 2},
            "model.secnd (did you mean 'second'?): takes_two does not accept",
        ),
        ({"_target_": "two"}, "model.first is required by takes_two"),
        ({"_target_": "any"}, "model.first is required by takes_any"),
        ({"_target_": "two", "first": {"_target_": "two", "third": 3}}, "unknown key model.first.third"),
        ({"_target_": "any", "first": [{"_target_": "two"}]}, "model.first.0.first is required by takes_two"),
        ({"_target_": "any", "first": {"deep": {"_target_": "two"}}}, "model.first.deep.first is required"),
        ({"_target_": "partial", "frist": 1}, "unknown key model.frist (did you mean 'first'?)"),
        ({"first": 1}, "model needs a _target_"),
        (
            {"_target_": "any", "first": 1, "collate_fn": {"_target_": "two", "second": 3}},
            "model.collate_fn: a function with some of its arguments is not available yet",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(checked, raw, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked(raw)


def test_a_target_without_a_signature_is_not_checked():
    check_arguments(ConfigNode({"_target_": "builtins.dict", "anything": 1}))


@pytest.mark.parametrize("target", [None, 5, "am_absent.thing"])
def test_a_target_that_names_nothing_is_found(target):
    with pytest.raises(ImportError) as caught:
        check_arguments(ConfigNode({"_target_": target}, path="model"))
    assert any(text.startswith("while resolving model._target_") for text in caught.value.__notes__)


def test_the_refusal_names_path_value_and_expectation():
    error = refuse("a.b", 0, "a positive integer")
    assert isinstance(error, ValueError)
    assert str(error) == "a.b must be a positive integer, got 0"
