import subprocess
import sys
import traceback

import pytest

from automodel.config.loader import ConfigNode

SECRET = "s3ntinel-Value"
FILE = """
class CannotChange(Exception):
    def __init__(self, text):
        super().__init__()
        object.__setattr__(self, "hidden", [[text]])
    def __str__(self):
        return f"cannot change {self.hidden[0][0]}"

class WithCode(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail
    def __str__(self):
        return f"{self.detail} ({self.args[0]})"

def fail(kind, **values):
    value = values.get("value")
    text = f"bad value {value}"
    if kind == "value":
        raise ValueError(text)
    if kind == "argument":
        raise ValueError("bad value", value, [value, {"x": value}])
    if kind == "repr":
        raise ValueError(f"bad values {values}")
    if kind == "key":
        raise KeyError(value)
    if kind == "file":
        open(str(value))
    if kind == "attribute":
        raise WithCode(5, detail=text)
    if kind == "unchangeable":
        raise CannotChange(text)
    if kind == "cause":
        try:
            raise OSError(13, "refused", str(value))
        except OSError as error:
            raise RuntimeError("outer") from error
    if kind == "context":
        try:
            {}[str(value)]
        except KeyError:
            raise RuntimeError("outer")
    if kind == "group":
        raise ExceptionGroup("several", [ValueError(text), TypeError(text)])
    if kind == "note":
        error = ValueError("bad")
        error.add_note(text)
        raise error
    if kind == "exit":
        raise SystemExit(text)
"""
KINDS = {
    "value": ValueError,
    "argument": ValueError,
    "repr": ValueError,
    "key": KeyError,
    "file": FileNotFoundError,
    "attribute": Exception,
    "unchangeable": Exception,
    "cause": RuntimeError,
    "context": RuntimeError,
    "group": ExceptionGroup,
    "note": ValueError,
    "exit": SystemExit,
}


@pytest.fixture
def fail(tmp_path):
    file = tmp_path / "failing.py"
    file.write_text(FILE)
    return f"{file}:fail"


def text_of(error):
    """Everything that a person or a log can come to see of an error, its whole chain too."""
    texts, seen, waiting = [], set(), [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        texts += [str(one), repr(one), *traceback.format_exception(one)]
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return "\n".join(texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("resolved", "written"),
    [
        (SECRET, "${AM_SECRET}"),
        (SECRET, "https://user:${AM_SECRET}@host/x"),
        ("987654321", "${AM_SECRET}"),
        ("9876.54321", "${AM_SECRET}"),
        (f"['x', '{SECRET}', 1]", "${AM_SECRET}"),
        (f"{{'{SECRET}': 123456789}}", "$AM_SECRET"),
        ("a \"quoted\"\nsecret\\with 'all'", "${AM_SECRET}"),
    ],
)
def test_no_error_of_a_target_shows_what_the_environment_gave(monkeypatch, fail, kind, resolved, written):
    monkeypatch.setenv("AM_SECRET", resolved)
    config = ConfigNode({"model": {"_target_": fail, "kind": kind, "value": written}})
    with pytest.raises(KINDS[kind]) as caught:
        config.model.instantiate()
    text = text_of(caught.value)
    for needle in (SECRET, "987654321", "9876.54321", "123456789", '"quoted"', "with 'all'", "with \\'all"):
        assert needle not in text
    assert "AM_SECRET" in text
    assert kind == "exit" or f"while instantiating model (_target_: {fail})" in caught.value.__notes__


def test_what_cannot_be_rewritten_is_replaced_by_an_error_of_the_same_kind(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", SECRET)
    config = ConfigNode({"_target_": fail, "kind": "unchangeable", "value": "${AM_SECRET}"})
    with pytest.raises(Exception, match=r"^cannot change bad value \$\{AM_SECRET\}\n") as caught:
        config.instantiate()
    module = sys.modules[config["_target_"].__module__]
    assert isinstance(caught.value, module.CannotChange)
    assert type(caught.value).__name__ == "CannotChange"
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"


def test_pythons_text_stays_where_it_shows_nothing(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", "abc")
    monkeypatch.setenv("AM_FLAG", "true")
    config = ConfigNode(
        {"_target_": fail, "kind": "value", "value": "true abc false", "x": "${AM_SECRET}", "y": "$AM_FLAG"}
    )
    with pytest.raises(ValueError, match=r"^bad value true abc false\n"):
        config.instantiate()
    config = ConfigNode({"_target_": "builtins.int", "nonsense": "${AM_SECRET}"})
    with pytest.raises(TypeError, match=r"'nonsense' is an invalid keyword argument for int\(\)"):
        config.instantiate()


def test_hiding_twice_changes_nothing(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", "SECRET")
    config = ConfigNode({"_target_": fail, "kind": "value", "value": "${AM_SECRET}"})
    with (
        pytest.raises(ValueError, match=r"^bad value \$\{AM_SECRET\}\n"),
        config.hiding_values(),
        config.hiding_values(),
    ):
        config.instantiate()


def test_a_number_is_hidden_only_where_it_stands_alone(monkeypatch, fail):
    monkeypatch.setenv("AM_NUMBER", "1234")
    config = ConfigNode({"_target_": fail, "kind": "value", "value": "1234 12345 51234 0.1234", "x": "${AM_NUMBER}"})
    with pytest.raises(ValueError, match=r"^bad value \$\{AM_NUMBER\} 12345 51234 0\.1234\n"):
        config.instantiate()


def test_literal_secrets_of_a_recipe_are_hidden_too(fail):
    url = "postgres://me:pa55word@host"
    for values, shown in [
        ({"value": url}, "bad value postgres://me:<redacted>@host"),
        ({"value": "x hunter22 y", "password": "hunter22"}, "bad value x <redacted> y"),
        ({"value": "x 123456 y", "password": 123456}, "bad value x <redacted> y"),
        ({"value": "x hunter22 y", "api_key": "${AM_ABSENT,hunter22}"}, "bad value x ${AM_ABSENT,<redacted>} y"),
        ({"value": "x hunter22 y", "auth": {"list": ["hunter22"]}}, "bad value x <redacted> y"),
    ]:
        config = ConfigNode({"_target_": fail, "kind": "value", **values})
        with pytest.raises(ValueError, match="bad value") as caught:
            config.instantiate()
        assert str(caught.value) == shown


def test_values_of_nested_nodes_and_of_arguments_are_hidden(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", SECRET)
    other = ConfigNode({"deep": ["${AM_SECRET}"]})
    config = ConfigNode({"_target_": fail, "kind": "value"})
    with pytest.raises(ValueError, match=r"^bad value \{'deep': \['\$\{AM_SECRET\}'\]\}\n"):
        config.instantiate(value=other.arguments(), other=other)
    with pytest.raises(ValueError, match=r"^bad value \$\{AM_SECRET\}\n"):
        ConfigNode({"job": {"token": "${AM_SECRET}"}, "m": config}).m.instantiate(value="${AM_SECRET}")


def test_a_name_from_the_environment_is_hidden_while_it_is_resolved(monkeypatch, tmp_path):
    for name in (f"{SECRET}.thing", f"os.{SECRET}", "os.s3ntinel_Value", f"{tmp_path}/s3ntinel.py:x", "os.s3ntinel.x"):
        monkeypatch.setenv("AM_SECRET", name)
        config = ConfigNode({"x_fn": "${AM_SECRET}"})
        with pytest.raises((ImportError, ValueError)) as caught:
            _ = config.x_fn
        assert "s3ntinel" not in text_of(caught.value)
        assert "while resolving x_fn: ${AM_SECRET}" in caught.value.__notes__


def test_our_own_messages_hide_short_values_and_flags(monkeypatch):
    monkeypatch.setenv("AM_NUMBER", "0")
    monkeypatch.setenv("AM_FLAG", "true")
    config = ConfigNode({"a": {"n": "${AM_NUMBER}", "f": "${AM_FLAG}", "zero": 0}})
    for place, value, text in [
        ("a.n", 0, "a.n must be positive, got '${AM_NUMBER}'"),
        ("a.f", True, "a.f must be a number, got '${AM_FLAG}'"),
        ("a.zero", 0, "a.zero must be positive, got 0"),
    ]:
        with pytest.raises(ValueError, match="must be") as caught, config.hiding_values():
            raise ValueError(f"{place} must be {'a number' if value is True else 'positive'}, got {value!r}")
        assert str(caught.value) == text
    for dotted in ("a.n.x", "a.f.x.y"):
        with pytest.raises(ValueError, match=r"is '\$\{AM_(NUMBER|FLAG)\}', not a mapping"):
            config.set_by_dotted(dotted, 1)


def test_an_error_that_the_program_prints_itself_shows_nothing(monkeypatch, fail):
    code = (
        "from automodel.config.loader import ConfigNode\n"
        f"ConfigNode({{'_target_': {fail!r}, 'kind': 'cause', 'value': '${{AM_SECRET}}'}}).instantiate()\n"
    )
    monkeypatch.setenv("AM_SECRET", SECRET)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PermissionError" in done.stderr
    assert "direct cause" in done.stderr
    assert SECRET not in done.stderr + done.stdout
