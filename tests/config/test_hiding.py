import subprocess
import sys
import traceback

import pytest
import yaml

from automodel.config.loader import ConfigNode

SECRET = "s3ntinel-Value"
FILE = """
import dataclasses

import yaml

class Held:
    def __init__(self, text):
        self.text = text

class CannotChange(Exception):
    def __init__(self, text):
        super().__init__()
        self.held = Held(text)
        self.code = 5
        self.words = ["seen", text]
    def __str__(self):
        return f"cannot change {self.held.text}"

class Empty(CannotChange):
    def __len__(self):
        return 0

class NeedsArguments(CannotChange):
    def __new__(cls, text):
        return super().__new__(cls, text)

class RefusesChanges(CannotChange):
    def __init__(self, text):
        self.__dict__["held"] = Held(text)
    def __setattr__(self, name, value):
        raise RuntimeError(f"no {self.held.text}")

class RefusesSubclasses(CannotChange):
    def __init_subclass__(cls):
        raise RuntimeError("no")

class OwnGroup(ExceptionGroup):
    pass

@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str

class BadStr(Exception):
    def __str__(self):
        raise RuntimeError(f"no text for {self.args}")
    __repr__ = __str__

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
    if kind == "unchangeable cause":
        try:
            yaml.safe_load(f"a: [{text}")
        except yaml.YAMLError as error:
            raise ValueError("outer") from error
    if kind == "unchangeable context":
        try:
            raise Empty(text)
        except Empty:
            raise RuntimeError("outer")
    if kind == "unchangeable ends":
        try:
            raise KeyError(value)
        except KeyError as error:
            raise CannotChange(text) from error
    if kind == "unchangeable members":
        raise OwnGroup("several", [ExceptionGroup("inner", [CannotChange(text)]), ValueError(5)])
    if kind == "group message":
        raise ExceptionGroup(text, [ValueError(5)])
    if kind == "circle":
        one, two = CannotChange(text), CannotChange(text)
        one.__cause__, two.__cause__ = two, one
        raise one
    if kind == "long chain":
        first = error = ValueError("first")
        for index in range(1500):
            error.__cause__ = (CannotChange if index % 2 else ValueError)(text)
            error = error.__cause__
        raise first
    if kind == "argument in itself":
        holder = [text]
        holder.append(holder)
        raise ValueError(holder, {"x": holder})
    if kind == "error in itself":
        error = ValueError(text)
        error.args = (text, error)
        raise error
    if kind == "needs arguments":
        raise NeedsArguments(text)
    if kind == "refuses changes":
        raise RefusesChanges(text)
    if kind == "refuses subclasses":
        raise RefusesSubclasses(text)
    if kind == "frozen":
        raise Frozen(text)
    if kind == "bad str":
        raise BadStr(text)
    if kind == "bad str argument":
        raise ValueError(BadStr(text), text)
    if kind == "stop":
        raise StopIteration(text)
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
    "unchangeable cause": ValueError,
    "unchangeable context": RuntimeError,
    "unchangeable ends": Exception,
    "unchangeable members": ExceptionGroup,
    "group message": ExceptionGroup,
    "circle": Exception,
    "argument in itself": ValueError,
    "error in itself": ValueError,
    "needs arguments": Exception,
    "refuses changes": Exception,
    "refuses subclasses": Exception,
    "frozen": Exception,
    "bad str": Exception,
    "bad str argument": ValueError,
    "stop": StopIteration,
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
    assert "AM_SECRET" in text or kind.startswith("bad str")
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
    assert (caught.value.code, caught.value.words) == (5, ["seen", "bad value ${AM_SECRET}"])
    assert caught.value.__context__ is None


def test_every_error_of_a_chain_keeps_its_class_and_its_place_in_it(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", SECRET)

    def caught(kind):
        with pytest.raises(KINDS[kind]) as raised:
            ConfigNode({"_target_": fail, "kind": kind, "value": "${AM_SECRET}"}).instantiate()
        return raised.value

    cause = caught("unchangeable cause").__cause__
    assert isinstance(cause, yaml.YAMLError)
    assert "a: [bad value ${AM_SECRET}" in str(cause)
    assert traceback.extract_tb(cause.__traceback__)
    context = caught("unchangeable context")
    assert type(context.__context__).__name__ == "Empty"
    assert (context.__cause__, context.__suppress_context__) == (None, False)
    ends = caught("unchangeable ends")
    assert isinstance(ends.__cause__, KeyError)
    assert ends.__cause__ is ends.__context__
    assert ends.__suppress_context__
    group = caught("unchangeable members")
    assert type(group).__name__ == "OwnGroup"
    inner, other = group.exceptions
    assert str(other) == "5"
    assert [type(member).__name__ for member in inner.exceptions] == ["CannotChange"]
    assert str(caught("group message")) == "bad value ${AM_SECRET} (1 sub-exception)"
    assert str(caught("bad str")) == "a BadStr that has no text"
    for kind, name in [("frozen", "Frozen"), ("needs arguments", "NeedsArguments"), ("bad str", "BadStr")]:
        error = caught(kind)
        assert type(error).__name__ == name
        assert error.__context__ is None
        assert error.__notes__ == [f"while instantiating <top> (_target_: {fail})"]
    circle = caught("circle")
    assert circle.__cause__.__cause__ is circle


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


def test_parts_of_a_secret_are_hidden_where_they_stand_alone(monkeypatch, fail):
    monkeypatch.setenv("AM_KEY", "-----BEGIN-----\nfirst-s3ntinel\n  second-s3ntinel\nab\n")
    monkeypatch.setenv("AM_DSN", "postgres://me:pw%2Ds3ntinel@host:5432/db")
    for value, shown in [
        ("line first-s3ntinel", "line ${AM_KEY}"),
        ("line second-s3ntinel, ab", "line ${AM_KEY}, ab"),
        ("password 'pw%2Ds3ntinel' refused", "password '${AM_DSN}' refused"),
        ("password 'pw-s3ntinel' refused", "password '${AM_DSN}' refused"),
        ("password 'l1teral/s3ntinel' refused", "password '<redacted>' refused"),
    ]:
        config = ConfigNode(
            {"_target_": fail, "kind": "value", "value": value, "x": "${AM_KEY}", "y": ["${AM_DSN}"]}
            | {"z": "https://me:l1teral%2Fs3ntinel@host"}
        )
        with pytest.raises(ValueError, match="bad value") as caught:
            config.instantiate()
        assert str(caught.value) == f"bad value {shown}"


def test_a_number_is_hidden_as_the_float_or_integer_that_code_makes_of_it(monkeypatch, fail):
    monkeypatch.setenv("AM_INT", "-37")
    monkeypatch.setenv("AM_FLOAT", "12345.0")
    monkeypatch.setenv("AM_LARGE", "9" * 400)
    config = ConfigNode({"a": {"n": "${AM_INT}", "f": "${AM_FLOAT}", "l": "${AM_LARGE}"}})
    for text, shown in [
        ("a.n must be positive, got -37.0", "a.n must be positive, got '${AM_INT}'"),
        ("a.n must be positive, got -37", "a.n must be positive, got '${AM_INT}'"),
        ("bad -37.0 and -37 and 12345 and 12,345", "bad ${AM_INT} and -37 and ${AM_FLOAT} and ${AM_FLOAT}"),
        ("9" * 400, "${AM_LARGE}"),
    ]:
        with pytest.raises(ValueError, match="AM_") as caught, config.hiding_values():
            raise ValueError(text)
        assert str(caught.value) == shown


def test_parts_of_the_name_of_a_recipe_class_are_hidden(monkeypatch):
    monkeypatch.setenv("AM_SECRET", "s3ntinel_package.Inner")
    config = ConfigNode({"recipe": "${AM_SECRET}"})
    with pytest.raises(ImportError, match=r"^no module named \$\{AM_SECRET\}$"), config.hiding_values():
        raise ImportError("no module named s3ntinel_package")


def test_a_chain_of_any_length_is_hidden(monkeypatch, fail):
    monkeypatch.setenv("AM_SECRET", SECRET)
    with pytest.raises(ValueError, match="first") as caught:
        ConfigNode({"_target_": fail, "kind": "long chain", "value": "${AM_SECRET}"}).instantiate()
    error, texts = caught.value, []
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    assert texts == ["bad value ${AM_SECRET}", "cannot change bad value ${AM_SECRET}"] * 750
