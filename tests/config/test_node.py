import copy
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import yaml

from automodel.config.loader import ConfigList, ConfigNode, EnvironmentString, load_yaml_config
from automodel.config.targets import InvalidFileTargetError

SECRET = "s3cr3t-value"


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
        assert f"while resolving a.l.0._target_: {name}" in caught.value.__notes__
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


def test_instantiating_what_is_no_mapping():
    config = ConfigNode({"a": {"b": 5}})
    with pytest.raises(AttributeError, match=r"'a\.b' has no _target_ to instantiate: it is not a mapping"):
        config.instantiate_path("a.b")


# What the recipe says


def test_the_text_of_a_string_is_kept_where_it_spells_another_type(variables, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "quoted: '2024'\nplain: 2024\nlr: 1e-5\nport: $AM_PORT\nname: x\nl: ['007', 7, x]\nflag: 'none'\nm: {}\n"
    )
    config = load_yaml_config(file)
    texts = {key: config.text(key) for key in config}
    assert texts == {
        "quoted": "2024",
        "plain": None,
        "lr": "1e-5",
        "port": "8080",
        "name": "x",
        "l": None,
        "flag": "none",
        "m": None,
    }
    assert (config.quoted, config.lr, config.port) == (2024, 1e-5, 8080)
    assert [config.l.text(index) for index in range(3)] == ["007", None, "x"]
    # A saved configuration holds the same text.
    file.write_text(str(config))
    again = load_yaml_config(file)
    assert again.text("quoted") == "2024"
    assert again.to_dict() == config.to_dict()
    with pytest.raises(KeyError):
        config.text("absent")


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_of_lists_keep_what_the_recipe_says(variables, copied):
    config = ConfigNode(PLACED)
    made = copied(config.list)
    assert type(made) is ConfigList
    assert made == config.list
    assert repr(made) == repr(config.list)
    made[1] = 5
    made.append("new")
    assert "8080" not in repr(config.list)
    assert config.list[1] == 8080
    assert repr(made).endswith("5, ['${AM_FLAG}'], {'deep': '${AM_PORT}'}, 'plain', 5, 'new']")


def test_a_shallow_copy_can_be_changed_alone(variables):
    config = ConfigNode(PLACED)
    made = copy.copy(config)
    made.number = 1
    made.new = 2
    assert config.to_yaml_dict() == PLACED
    assert made.to_yaml_dict()["number"] == 1


def test_a_new_key_among_numbers_is_a_number():
    config = ConfigNode({"ids": {0: "a", 1: "b"}, "names": {"0": "a"}, "empty": {}})
    for path in ("ids.1", "ids.2", "ids.-3", "ids.x", "ids.4", "names.1", "empty.1"):
        config.set_by_dotted(path, "new")
    assert config.to_dict() == {
        "ids": {0: "a", 1: "new", 2: "new", -3: "new", "x": "new", "4": "new"},
        "names": {"0": "a", "1": "new"},
        "empty": {"1": "new"},
    }


def test_a_key_that_holds_dots_is_set_where_it_stands():
    config = ConfigNode({"a.b": 1, "c": {"d.e": 2}})
    config.set_by_dotted("a.b", 3)
    config.set_by_dotted("c.d.e", 4)
    assert config.to_dict() == {"a.b": 3, "c": {"d.e": 4}}


def test_a_placeholder_that_cannot_be_resolved_changes_nothing(variables):
    config = ConfigNode({"a": 1})
    with pytest.raises(KeyError, match="AM_MISSING") as caught:
        config.set_by_dotted("b.c", "${AM_MISSING}")
    assert caught.value.__notes__ == ["while resolving b.c"]
    assert config.to_dict() == {"a": 1}


def test_asking_whether_a_key_is_there_imports_nothing():
    config = ConfigNode({"a": {"x_fn": "am_absent.f", "_target_": "am_absent.g"}})
    assert "a.x_fn" in config
    assert "a._target_" in config
    assert "a.x_fn.y" not in config


def test_errors_of_a_file_name_its_lines(variables, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("a: 1\nmodel:\n  _target_: am_absent.thing\nm:\n  _target_: builtins.int\n  nonsense: 1\n")
    config = load_yaml_config(file)
    with pytest.raises(ImportError) as caught:
        config.resolve_targets()
    assert caught.value.__notes__ == [f"while resolving model._target_: am_absent.thing ({file}:3)"]
    with pytest.raises(TypeError) as caught:
        config.m.instantiate()
    assert caught.value.__notes__ == [f"while instantiating m (_target_: builtins.int) ({file}:5)"]
    file.write_text("a: 1\nl:\n- x\n- ${AM_MISSING}\n")
    with pytest.raises(KeyError) as caught:
        load_yaml_config(file)
    assert caught.value.__notes__ == [f"while resolving l.1 ({file}:4)"]


def test_the_deepest_recipe_can_be_used(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("{a: " * 99 + "{_target_: builtins.dict}" + "}" * 99 + "\n")
    config = load_yaml_config(file)
    path = ".".join("a" * 99)
    assert config.instantiate_path(path) == {}
    assert path in config
    for made in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), ConfigNode(yaml.safe_load(str(config)))):
        assert made == config
    config.resolve_targets()
    config.set_by_dotted(f"{path}.x", 1)
    with pytest.raises(ValueError, match="a path of 101 parts, the limit is 100"):
        config.set_by_dotted(f"{path}.x.y", 1)
