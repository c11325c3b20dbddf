"""Random recipes, files and overrides: only the documented errors, never a crash, never a value of the environment."""

import copy
import json
import pickle
import traceback

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.config.overrides import apply_overrides, parse_overrides
from automodel.config.yaml_file import YamlFileError

SENTINELS = {
    "AM_TEXT": "s3ntinel-text",
    "AM_NUMBER": "917364519",
    "AM_FLOAT": "9173.64825",
    "AM_LIST": "['s3ntinel-a', 917364528, {'k': 's3ntinel-b'}]",
    "AM_QUOTED": "'s3ntinel \"quoted\" \\\\ text'",
    "AM_DOLLAR": "pa$AM_TEXT-s3ntinel",
    "AM_NEWLINE": "s3ntinel\nline s3ntinel",
    "AM_DSN": "postgres://me:s3ntinel@host/s3ntinel",
}
NEEDLES = ("s3ntinel", "917364519", "9173.64825", "917364528")
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

placeholders = st.sampled_from(sorted(SENTINELS)).flatmap(
    lambda name: st.sampled_from(
        [f"${{{name}}}", f"${name}", f"${{oc.env:{name}}}", f"${{{name},d}}", f"a${{{name}}}b", f"https://u:${name}@h"]
    )
)
texts = st.one_of(
    st.sampled_from(
        ["", "none", "true", "1e-5", "[1, 2]", "{'a': 1}", "'10'", "$5", "${", "${AM_ABSENT,x}", "a=b", "..."]
    ),
    st.sampled_from(
        ["https://me:pw@h", "password=pw;x=1", "builtins.dict", "builtins.int", "os.path.join", "am.absent"]
    ),
    st.text(max_size=8),
)
keys = st.one_of(
    st.sampled_from(
        [
            "a",
            "b.c",
            "_target_",
            "x_fn",
            "password",
            "hf_token",
            "eos_token",
            "items",
            "get",
            "_values",
            "path",
            "0",
            "<<",
        ]
    ),
    st.text(max_size=4),
    st.integers(-3, 9),
    st.sampled_from([True, None, 0.5]),
)
leaves = st.one_of(
    placeholders,
    placeholders,
    texts,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.binary(max_size=3),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
recipes = st.dictionaries(keys, values, min_size=1, max_size=5)
paths = st.lists(keys.map(str) | st.sampled_from(["a", "0", "1", "x"]), min_size=1, max_size=4).map(".".join)


@pytest.fixture
def sentinels(monkeypatch):
    for name, value in SENTINELS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AM_ABSENT", raising=False)


def assert_shows_nothing(text):
    found = [needle for needle in NEEDLES if needle in text]
    assert not found, text


def assert_names(file, error):
    assert str(file) in str(error)


def assert_error_shows_nothing(error):
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        assert_shows_nothing("".join([str(one), repr(one), *traceback.format_exception_only(one)]))
        waiting += [one.__cause__, one.__context__]


def use(config):
    """Print, copy, look up and instantiate everything; errors must be those that are documented."""
    for text in (str(config), repr(config), json.dumps(_with_text_keys(config.to_yaml_dict()))):
        assert_shows_nothing(text)
    yaml.safe_load(str(config))
    for made in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert str(made) == str(config)
        assert repr(made.to_dict()) == repr(config.to_dict())
    for key in config:
        assert key in config
        assert_shows_nothing(config.shown(key))
        str(config.origin(key))
    for act in (config.resolve_targets, config.instantiate, lambda: [config[key] for key in config], config.arguments):
        try:
            act()
        # What targets raise is theirs; a key of any type may be no keyword.
        except (ImportError, ValueError, AttributeError, TypeError, AssertionError, OSError) as error:
            assert_error_shows_nothing(error)
    assert_shows_nothing(str(config))


def _with_text_keys(value):
    match value:
        case dict():
            return {str(key): _with_text_keys(item) for key, item in value.items()}
        case list():
            return [_with_text_keys(item) for item in value]
        case _:
            return value


@SETTINGS
@given(raw=recipes)
@example(raw={"_target_": "builtins.int", "x": "${AM_NUMBER}"})
@example(raw={"x_fn": "$AM_TEXT", "a": {"password": ["${AM_LIST}"]}})
def test_recipes_from_python(sentinels, raw):
    try:
        config = ConfigNode(raw)
    except KeyError as error:
        assert_error_shows_nothing(error)
        return
    use(config)


@SETTINGS
@given(raw=recipes, data=st.data())
def test_files(sentinels, tmp_path, raw, data):
    text = yaml.safe_dump(raw, allow_unicode=True, default_flow_style=data.draw(st.sampled_from([True, False, None])))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 3))
        text = (
            text[:place]
            + data.draw(
                st.sampled_from(
                    [
                        "",
                        "\t",
                        "&a ",
                        "*a",
                        "- ",
                        ": ",
                        "!x ",
                        "!!int ",
                        "!!bool ",
                        "!!map ",
                        "!!set ",
                        "? ",
                        "| ",
                        "!!int ",
                        "!!bool ",
                        "!!set ",
                        "!!map ",
                        "? ",
                        "%",
                        "\0",
                        "{",
                        "'",
                        "\n",
                        "<<: *a\n",
                    ]
                )
            )
            + text[place + length :]
        )
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text.encode("utf-8", errors="replace"))
    try:
        config = load_yaml_config(file)
    except YamlFileError as error:
        assert_names(file, error)
        assert_error_shows_nothing(error)
        return
    except KeyError as error:
        assert_error_shows_nothing(error)
        return
    use(config)


@SETTINGS
@given(content=st.binary(max_size=40))
def test_bytes(sentinels, tmp_path, content):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    try:
        load_yaml_config(file)
    except YamlFileError as error:
        assert_names(file, error)
    except KeyError as error:
        assert_error_shows_nothing(error)


@SETTINGS
@given(
    raw=recipes,
    words=st.lists(
        st.one_of(
            paths.map("--{}".format), st.builds("--{}={}".format, paths, texts | placeholders), texts, placeholders
        ),
        max_size=5,
    ),
)
@example(raw={"a": "${AM_NUMBER}"}, words=["--a.b", "1"])
@example(raw={"a": ["${AM_LIST}"]}, words=["--a.0.0", "$AM_TEXT"])
def test_overrides(sentinels, raw, words):
    try:
        config = ConfigNode(raw)
    except KeyError:
        return
    try:
        apply_overrides(config, parse_overrides(words))
    except (ValueError, KeyError) as error:
        assert_error_shows_nothing(error)
    use(config)
