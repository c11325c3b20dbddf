import copy
import json
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import yaml

from automodel.config import loader
from automodel.config.loader import ConfigNode, EnvironmentString, load_yaml_config
from automodel.config.targets import InvalidFileTargetError
from automodel.recipes.catalogue import find_recipe, list_shipped

SECRET = "s3cr3t-value"


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setenv("AM_TOKEN", SECRET)
    monkeypatch.setenv("AM_PORT", "8080")
    monkeypatch.setenv("AM_FLAG", "true")
    monkeypatch.setenv("AM_LIST", "[1, 2]")
    monkeypatch.setenv("AM_DOLLAR", "pa$word")
    monkeypatch.delenv("AM_MISSING", raising=False)
    return monkeypatch


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "user_code.py"
    file.write_text(
        "class Made:\n    def __init__(self, **values):\n        self.values = values\n\ndef f(x=1):\n    return x\n"
    )
    return file


def test_a_file_becomes_nested_typed_nodes(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("a: {b: {c: '10'}}\nl: [{x: 1e-5}, [true, 'none']]\nn: 3\n5: five\ntext: hello\n")
    config = load_yaml_config(file)
    assert config.a.b.c == config["a"]["b"]["c"] == config.get("a.b.c") == 10
    assert config.l[0].x == 1e-5
    assert config.l[1] == [True, None]
    assert config[5] == "five"
    assert list(config) == ["a", "l", "n", 5, "text"]
    assert len(config) == 5
    assert dict(config.items())["n"] == 3
    assert config.l[0].path == "l.0"
    assert load_yaml_config(str(file)) == config


def test_get_and_in():
    config = ConfigNode({"a": {"b": None, "c.d": 1}, "l": [{"x": 1}], "x.y": 2, 5: "int"})
    assert config.get("a.b", "default") is None
    assert config.get("l.0.x") == 1
    assert config.get("x.y") == 2
    assert config.get(5) == "int"
    for path in ("a.z", "a.b.c", "z", "l.1", "l.x", "l.-1", "l.0.x.y", "l.\u00b2", "", ".", "a."):
        assert config.get(path, "default") == "default", path
        assert path not in config, path
    assert config.get(6, "default") == "default"
    for path in ("a", "a.b", "l.0.x", "x.y", 5):
        assert path in config, path


def test_a_missing_key_is_named_with_the_nearest():
    config = ConfigNode({"model": {"hidden_size": 3}})
    with pytest.raises(AttributeError, match=r"no 'model\.hiden_size' \(did you mean 'hidden_size'\?\)"):
        _ = config.model.hiden_size
    with pytest.raises(AttributeError, match=r"no 'zzz'$"):
        _ = config.zzz
    with pytest.raises(KeyError, match="zzz"):
        _ = config["zzz"]
    assert not hasattr(config, "zzz")
    assert getattr(config, "zzz", 5) == 5


def test_assignment_wraps_and_translates():
    config = ConfigNode({})
    config.a = {"b": "3"}
    config["c"] = ["4", {"d": "true"}]
    assert config.a.b == 3
    assert config.c[0] == 4
    assert config.c[1].d is True
    assert config.c[1].path == "c.1"


def test_a_key_named_like_a_method_is_reachable_and_harmless():
    config = ConfigNode({"items": 1, "get": 2, "path": 3, "raw_config": 4})
    assert (config["items"], config["get"], config["path"]) == (1, 2, 3)
    assert dict(config.items()) == {"items": 1, "get": 2, "path": 3, "raw_config": 4}
    config.items = 5
    assert config["items"] == 5
    assert config.get("items") == 5


def test_the_mapping_that_was_given_is_not_changed():
    raw = {"a": {"b": 1}, "l": [1, {"c": 2}]}
    config = ConfigNode(raw)
    config.a.b = 5
    config.set_by_dotted("l.1.c", 6)
    config.l.append(7)
    assert raw == {"a": {"b": 1}, "l": [1, {"c": 2}]}
    assert config.to_dict() == {"a": {"b": 5}, "l": [1, {"c": 6}, 7]}


def test_get_as_string():
    config = ConfigNode({"a": {"n": 5, "s": "x", "none": None}})
    assert config.get_as_string("a.n") == "5"
    assert config.get_as_string("a.s") == "x"
    assert config.get_as_string("a.none", "default") == "default"
    assert config.get_as_string("a.z") is None


# Placeholders


def test_placeholders_are_resolved_then_typed(variables):
    config = ConfigNode(
        {"s": "${AM_TOKEN}", "n": "${AM_PORT}", "b": "${AM_FLAG}", "l": "${AM_LIST}", "d": "$AM_DOLLAR"}
    )
    assert config.to_dict() == {"s": SECRET, "n": 8080, "b": True, "l": [1, 2], "d": "pa$word"}
    assert config.s._orig_value == "${AM_TOKEN}"
    assert config.d == "pa$word"


def test_a_missing_variable_names_variable_and_place(variables):
    with pytest.raises(KeyError, match="'AM_MISSING' is not set") as caught:
        ConfigNode({"a": {"l": [1, "${AM_MISSING}"]}})
    assert "while resolving a.l.1" in caught.value.__notes__


def test_neither_keys_nor_targets_are_interpolated(variables):
    config = ConfigNode({"$AM_MISSING": 1, "_target_": "$AM_MISSING.x"})
    assert config["$AM_MISSING"] == 1
    assert config.to_dict()["_target_"] == "$AM_MISSING.x"


PLACED = {
    "token": "${AM_TOKEN}",
    "url": "https://${AM_TOKEN}@host",
    "number": "${AM_PORT}",
    "flag": "${AM_FLAG}",
    "literal": "${AM_LIST}",
    "list": ["${AM_TOKEN}", "${AM_PORT}", ["${AM_FLAG}"], {"deep": "${AM_PORT}"}, "plain", 5],
    "default": "${AM_MISSING,9}",
}


def test_printing_keeps_placeholders_of_every_type(variables):
    config = ConfigNode(PLACED)
    assert config.list[:2] == [SECRET, 8080]
    assert config.to_yaml_dict() == PLACED
    assert config.raw_config == PLACED
    assert yaml.safe_load(str(config)) == PLACED
    assert repr(config) == str(config)
    for resolved in (SECRET, "8080", "True", "[1, 2]"):
        assert resolved not in str(config)


def test_resolved_values_on_request_only(variables):
    config = ConfigNode(PLACED)
    resolved = config.to_yaml_dict(resolve_env=True, redact_sensitive=False)
    assert resolved == config.to_dict() == config.to_yaml_dict(use_orig_values=False, redact_sensitive=False)
    assert resolved["list"] == [SECRET, 8080, [True], {"deep": 8080}, "plain", 5]
    assert resolved["default"] == 9
    assert type(resolved["token"]) is type(resolved["list"][0]) is str


def test_a_changed_value_prints_as_it_is_now(variables):
    config = ConfigNode(PLACED)
    config.number = 1
    config.set_by_dotted("list.1", 2)
    config.list[0] = "changed"
    config.set_by_dotted("list.5", "${AM_PORT}")
    printed = config.to_yaml_dict()
    assert printed["number"] == 1
    assert printed["list"] == ["changed", 2, ["${AM_FLAG}"], {"deep": "${AM_PORT}"}, "plain", "${AM_PORT}"]


def test_sensitive_keys_are_redacted_unless_they_hold_a_placeholder(variables):
    config = ConfigNode(
        {"api_key": "literal", "password": 1234, "hf_token": "${AM_TOKEN}", "secret": None, "eos_token": "</s>"}
        | {"db": {"url": "https://me:pw@host"}, "auth": {"user": "me"}, "list": [{"pwd": "x"}]}
    )
    assert config.to_yaml_dict() == {
        "api_key": "<redacted>",
        "password": "<redacted>",
        "hf_token": "${AM_TOKEN}",
        "secret": None,
        "eos_token": "</s>",
        "db": {"url": "https://me:<redacted>@host"},
        "auth": "<redacted>",
        "list": [{"pwd": "<redacted>"}],
    }
    assert config.to_yaml_dict(redact_sensitive=False)["api_key"] == "literal"
    assert config.to_dict()["password"] == 1234


@pytest.mark.parametrize("options", [{"resolve_env": True}, {"use_orig_values": False}])
def test_resolved_secrets_are_redacted_even_if_they_look_like_placeholders(variables, options):
    config = ConfigNode({"password": "${AM_DOLLAR}"})
    assert config.to_yaml_dict(**options) == {"password": "<redacted>"}


def test_what_is_printed_loads_again(variables, tmp_path):
    raw = PLACED | {"quoted": "'10'", "lr": "1e-5", "word": "'none'", "date": 5, "inner": [{"x": "'7'"}]}
    config = ConfigNode(raw)
    file = tmp_path / "config.yaml"
    file.write_text(str(config))
    again = load_yaml_config(file)
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert (again.quoted, again.word, again.inner[0].x) == ("10", "none", "7")


def test_values_without_a_yaml_form_print_as_text():
    config = ConfigNode({"loss_fn": "builtins.len", "t": "(1, 2)"})
    config.function = OrderedDict
    assert callable(config.loss_fn)
    assert config.to_yaml_dict() == {"loss_fn": "builtins.len", "t": [1, 2], "function": "OrderedDict"}
    assert "OrderedDict" in str(config)
    json.dumps(config.to_yaml_dict())


# Copies and equality


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda node: pickle.loads(pickle.dumps(node))])
def test_copies_are_equal_and_keep_their_values(variables, copied):
    raw = PLACED | {"quoted": "'10'", "tuple": "(1, 2)", "inner": {"x": ["'7'"]}, 5: 6, "x_fn": "builtins.len"}
    config = ConfigNode(raw, path="top")
    assert config.x_fn is len
    expected = config.to_dict()
    # The values were resolved once: a copy does not ask the environment again.
    for name in ("AM_TOKEN", "AM_PORT", "AM_FLAG", "AM_LIST"):
        variables.delenv(name)
    made = copied(config)
    assert made == config
    assert made.to_dict() == expected
    assert (made.quoted, made.tuple, made.inner.x) == ("10", (1, 2), ["7"])
    assert made.to_yaml_dict() == config.to_yaml_dict()
    assert isinstance(made.token, EnvironmentString)
    assert made.x_fn is len
    assert made.path == "top"
    assert made.inner.path == "top.inner"


def test_a_deep_copy_shares_nothing():
    config = ConfigNode({"a": {"b": 1}, "l": [{"c": 2}, [3]]})
    made = copy.deepcopy(config)
    made.a.b = 9
    made.l[0].c = 9
    made.l[1].append(9)
    made.new = 9
    assert config.to_dict() == {"a": {"b": 1}, "l": [{"c": 2}, [3]]}


def test_a_symbol_of_a_file_survives_pickling(user_file):
    config = ConfigNode({"x_fn": f"{user_file}:f", "m": {"_target_": f"{user_file}:Made"}})
    config.resolve_targets()
    code = (
        "import pickle, sys; c = pickle.load(sys.stdin.buffer); assert c.x_fn() == 1 and c.m.instantiate().values == {}"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), check=True)


def test_equality():
    assert ConfigNode({"a": {"b": [1, {"c": 2}]}}) == ConfigNode({"a": {"b": [1, {"c": 2}]}})
    assert ConfigNode({"a": 1}) != ConfigNode({"a": 2})
    assert ConfigNode({"a": 1}) != {"a": 1}
    unresolved, resolved = ConfigNode({"x_fn": "builtins.len"}), ConfigNode({"x_fn": "builtins.len"})
    assert callable(resolved.x_fn)
    assert unresolved == resolved
    with pytest.raises(TypeError, match="unhashable"):
        hash(resolved)


def test_a_node_that_is_set_elsewhere_is_a_copy_with_its_new_place(variables):
    config = ConfigNode({"a": {"n": "${AM_PORT}", "l": [{"m": "${AM_PORT}"}]}})
    variables.delenv("AM_PORT")
    config.b = config.a
    config.c = config.a.l
    config.b.n = 1
    assert config.a.n == 8080
    assert config.b.l[0].path == "b.l.0"
    assert config.c[0].path == "c.0"
    assert config.to_yaml_dict()["c"] == [{"m": "${AM_PORT}"}]


# set_by_dotted


def test_set_by_dotted(variables):
    config = ConfigNode({"a": {"b": 1}, "l": [1, {"x": 2}, [3]], "none": None})
    config.set_by_dotted("a.b", "5")
    config.set_by_dotted("a.new.c", {"d": "6"})
    config.set_by_dotted("l.0", {"y": 7})
    config.set_by_dotted("l.1.x", "${AM_PORT}")
    config.set_by_dotted("l.2.0", [8])
    config.set_by_dotted("none.z", 9)
    config.set_by_dotted("top", None)
    assert config.to_dict() == {
        "a": {"b": 5, "new": {"c": {"d": 6}}},
        "l": [{"y": 7}, {"x": 8080}, [[8]]],
        "none": {"z": 9},
        "top": None,
    }
    assert config.get("l.0").path == "l.0"
    assert config.a.new.c.path == "a.new.c"


@pytest.mark.parametrize("path", ["leaf.x", "leaf.x.y", "l.2", "l.2.x", "l.x", "l.0.x", "", "a..b", "."])
def test_set_by_dotted_refuses_paths_that_lead_nowhere(path):
    config = ConfigNode({"leaf": 5, "l": [1, 2]})
    with pytest.raises(ValueError, match=f"{path!r}"):
        config.set_by_dotted(path, 1)
    assert config.to_dict() == {"leaf": 5, "l": [1, 2]}


# Targets


def test_targets_resolve_at_first_access_and_print_as_names():
    config = ConfigNode({"_target_": "collections.OrderedDict", "x_fn": "os.path.join", "f": "os.path.join"})
    assert config.to_dict() == {"_target_": "collections.OrderedDict", "x_fn": "os.path.join", "f": "os.path.join"}
    assert config._target_ is OrderedDict
    assert config["x_fn"]("a", "b") == "a/b"
    assert config.f == "os.path.join"
    assert config.raw_config == config.to_dict() == config.to_yaml_dict()
    assert config.to_dict()["x_fn"] == "os.path.join"


def test_a_function_key_may_be_absent_null_or_a_mapping():
    config = ConfigNode({"a_fn": None, "b_fn": {"_target_": "builtins.dict", "x": 1}, "c_fn": len})
    assert config.a_fn is None
    assert config.b_fn.instantiate() == {"x": 1}
    assert config.c_fn is len


def test_a_function_name_may_come_from_the_environment(variables):
    variables.setenv("AM_FUNCTION", "builtins.len")
    config = ConfigNode({"x_fn": "${AM_FUNCTION}"})
    assert config.x_fn is len
    assert config.to_yaml_dict() == {"x_fn": "${AM_FUNCTION}"}
    assert config.to_dict() == {"x_fn": "builtins.len"}


def test_setting_a_target_again_resolves_the_new_one():
    config = ConfigNode({"_target_": "builtins.dict"})
    assert config._target_ is dict
    config.set_by_dotted("_target_", "builtins.list")
    assert config._target_ is list
    assert config.to_dict() == {"_target_": "builtins.list"}


@pytest.mark.parametrize(
    ("name", "error_class"),
    [
        ("am_absent.thing", ImportError),
        ("os._exit", ImportError),
        ("os.sep", ImportError),
        ("absent.py:f", InvalidFileTargetError),
        (5, ImportError),
        (None, ImportError),
    ],
)
def test_a_bad_target_is_an_error_that_says_where_it_stands(name, error_class):
    config = ConfigNode({"a": {"l": [{"_target_": name}]}})
    for act in (config.resolve_targets, config.a.l[0].instantiate):
        with pytest.raises(error_class) as caught:
            act()
        assert "while resolving a.l.0._target_" in caught.value.__notes__
    assert config.to_dict() == {"a": {"l": [{"_target_": name}]}}


def test_a_key_error_inside_a_users_module_is_not_taken_for_a_missing_key(tmp_path):
    (tmp_path / "bad.py").write_text("{}['inside']\n")
    config = ConfigNode({"x_fn": f"{tmp_path}/bad.py:f"})
    with pytest.raises(KeyError, match="inside"):
        _ = config.x_fn


def test_instantiate(variables):
    config = ConfigNode(
        {
            "_target_": "collections.OrderedDict",
            "nested": {"_target_": "builtins.dict", "x": 1},
            "plain": {"y": {"_target_": "builtins.dict", "z": 2}},
            "list": [{"_target_": "builtins.list"}, 3],
            "text": "${AM_TOKEN}",
            "key_fn": "builtins.len",
        }
    )
    made = config.instantiate([("first", 0)], text="override", more=1)
    assert type(made) is OrderedDict
    assert made == {
        "first": 0,
        "nested": {"x": 1},
        "plain": {"y": {"z": 2}},
        "list": [[], 3],
        "text": "override",
        "key_fn": len,
        "more": 1,
    }
    assert type(made["plain"]) is dict
    assert type(made["list"]) is list
    text = config.instantiate()["text"]
    assert text == SECRET
    assert type(text) is str
    assert config.nested.to_dict() == {"_target_": "builtins.dict", "x": 1}


def test_what_an_override_replaces_is_not_instantiated():
    config = ConfigNode({"_target_": "builtins.dict", "config": {"_target_": "builtins.int", "absent_argument": 1}})
    with pytest.raises(TypeError):
        config.instantiate()
    assert config.instantiate(config=5) == {"config": 5}


def test_instantiate_without_a_target():
    config = ConfigNode({"model": {"x": 1}})
    with pytest.raises(AttributeError, match="'model' has no _target_"):
        config.model.instantiate()
    with pytest.raises(AttributeError, match="'the configuration' has no _target_"):
        config.instantiate()


def test_a_wrong_argument_keeps_pythons_error_and_gets_its_place():
    config = ConfigNode({"model": {"config": {"_target_": "builtins.int", "nonsense": 1}, "_target_": "builtins.dict"}})
    with pytest.raises(TypeError, match="nonsense") as caught:
        config.model.instantiate()
    assert caught.value.__notes__ == ["while instantiating model.config (_target_: builtins.int)"]


def test_instantiate_path():
    config = ConfigNode({"a": {"b": {"_target_": "builtins.dict", "x": 1}}})
    assert config.instantiate_path("a.b", y=2) == {"x": 1, "y": 2}
    assert config.instantiate_path("a.z", "default") == "default"
    assert config.instantiate_path("z") is None


def test_a_class_from_a_users_file(user_file):
    config = ConfigNode({"_target_": f"{user_file}:Made", "x": 1, "y": [2]})
    assert config.instantiate(z=3).values == {"x": 1, "y": [2], "z": 3}


def test_loading_a_shipped_recipe_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from automodel.config.loader import load_yaml_config\n"
        "from automodel.recipes.catalogue import find_recipe\n"
        "config = load_yaml_config(find_recipe('hybrid_tiny'))\n"
        "assert config.model.config.hidden_size == 256\n"
        "str(config), config.to_dict()\n"
        "print(*sorted({'torch', 'transformers', 'numpy', 'triton'}.intersection(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", [recipe.name for recipe in list_shipped()])
def test_the_shipped_recipes_load_and_print(name):
    config = load_yaml_config(find_recipe(name))
    assert ConfigNode(yaml.safe_load(str(config))) == config
    assert isinstance(config.step_scheduler.global_batch_size, int)
    assert isinstance(config.optimizer.lr, float)


def test_the_documented_names_are_exported():
    for name in ("load_yaml_config", "ConfigNode", "translate_value", "resolve_yaml_env_vars", "load_module_from_file"):
        assert name in loader.__all__
    assert loader.set_enable_user_modules in vars(loader).values()
