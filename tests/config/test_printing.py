import copy
import datetime
import json
from collections import OrderedDict

import pytest
import yaml

from automodel.config.loader import ConfigNode, load_yaml_config

SECRET = "s3cr3t-value"
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
    assert resolved == config.to_dict()
    assert resolved == config.to_yaml_dict(use_orig_values=False, resolve_env=True, redact_sensitive=False)
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
        "auth": {"user": "<redacted>"},
        "list": [{"pwd": "<redacted>"}],
    }
    assert config.to_yaml_dict(redact_sensitive=False)["api_key"] == "literal"
    assert config.to_dict()["password"] == 1234


def test_without_the_original_strings_placeholders_stay_all_the_same(variables):
    config = ConfigNode(PLACED | {"lr": "1e-5", "quoted": "'10'"})
    assert config.to_yaml_dict(use_orig_values=False) == PLACED | {"lr": 1e-5, "quoted": "10"}
    assert config.to_yaml_dict() == PLACED | {"lr": "1e-5", "quoted": "'10'"}


def test_resolved_secrets_are_redacted_even_if_they_look_like_placeholders(variables):
    config = ConfigNode({"password": "${AM_DOLLAR}"})
    assert config.to_yaml_dict(resolve_env=True) == {"password": "<redacted>"}


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
    assert config.to_yaml_dict() == {"loss_fn": "builtins.len", "t": "(1, 2)", "function": "collections.OrderedDict"}
    assert config.to_yaml_dict(use_orig_values=False)["t"] == [1, 2]
    assert "OrderedDict" in str(config)
    json.dumps(config.to_yaml_dict())


def test_values_as_messages_show_them(variables):
    config = ConfigNode(
        {"n": "${AM_PORT}", "s": "x", "i": 5, "q": "'10'", "password": "pw", "token": 5, "hf_token": "123456"}
        | {"url": "https://me:pw@host", "l": ["${AM_FLAG}", "y"], "lr": "1e-5", "x_fn": "builtins.len"}
        | {"api_key": "${AM_TOKEN}", "auth": ["pw", "$AM_PORT", None, True]}
    )
    assert config.x_fn is len
    assert {key: config.shown(key) for key in config} == {
        "n": "'${AM_PORT}'",
        "s": "'x'",
        "i": "5",
        "q": "'10'",
        "password": "<redacted>",
        "token": "5",
        "hf_token": "<redacted>",
        "url": "'https://me:<redacted>@host'",
        "l": "['${AM_FLAG}', 'y']",
        "lr": "1e-05",
        "x_fn": "'builtins.len'",
        "api_key": "'${AM_TOKEN}'",
        "auth": "['<redacted>', '$AM_PORT', None, True]",
    }
    assert [config.l.shown(0), config.l.shown(1)] == ["'${AM_FLAG}'", "'y'"]


def test_lists_and_leaves_print_placeholders_too(variables):
    config = ConfigNode(PLACED | {"nested": [["https://me:pw@host", "${AM_TOKEN}"]]})
    assert repr(config.list) == str(config.list) == str(PLACED["list"])
    assert repr(config.nested) == "[['https://me:<redacted>@host', '${AM_TOKEN}']]"
    assert repr(config.token) == repr("${AM_TOKEN}")
    assert str(config.token) == SECRET
    assert f"{[config.token, config]!r}".count(SECRET) == 0


def test_a_mapping_from_the_environment_stays_plain_and_prints_as_its_placeholder(variables):
    variables.setenv("AM_MAPPING", "{'a': {'_target_': 'os.getcwd'}, 'b': '${AM_MISSING}'}")
    config = ConfigNode({"m": "${AM_MAPPING}"})
    assert config.m == {"a": {"_target_": "os.getcwd"}, "b": "${AM_MISSING}"}
    assert config.get("m.b") == "${AM_MISSING}"
    assert ConfigNode({"_target_": "builtins.dict", "m": "${AM_MAPPING}"}).instantiate()["m"] == config.m
    assert config.to_yaml_dict() == {"m": "${AM_MAPPING}"}
    with pytest.raises(ValueError, match=r"cannot set 'm\.b': 'm' is '\$\{AM_MAPPING\}', not a mapping"):
        config.set_by_dotted("m.b", 1)


def test_secrets_below_sensitive_keys_of_plain_values(variables):
    variables.setenv("AM_MAPPING", "{'password': 'pw', 'x': ['https://me:pw@host', 5], 'token': 7}")
    config = ConfigNode({"m": "${AM_MAPPING}", "secrets": {"_target_": "builtins.dict", "a": 1, "b": [True, "x"]}})
    assert config.to_yaml_dict(resolve_env=True) == {
        "m": {"password": "<redacted>", "x": ["https://me:<redacted>@host", 5], "token": 7},
        "secrets": {"_target_": "builtins.dict", "a": "<redacted>", "b": [True, "<redacted>"]},
    }


def test_a_variable_with_a_sensitive_name_is_redacted_when_resolved(variables):
    config = ConfigNode({"name": "${AM_TOKEN}", "port": "${AM_PORT}", "x": "${AM_PASSWORD,hunter2}"})
    assert config.to_yaml_dict(resolve_env=True) == {"name": "<redacted>", "port": 8080, "x": "hunter2"}
    assert config.to_yaml_dict() == {"name": "${AM_TOKEN}", "port": "${AM_PORT}", "x": "${AM_PASSWORD,<redacted>}"}


def test_numbers_under_a_token_key_are_shown_and_texts_are_not():
    config = ConfigNode({"token": 5, "num_token": "5", "a_token": ["x", 5], "eos_token": "x", "b_token": True})
    for options in ({}, {"resolve_env": True}, {"use_orig_values": False}):
        assert config.to_yaml_dict(**options) == {
            "token": 5,
            "num_token": "<redacted>",
            "a_token": ["<redacted>", 5],
            "eos_token": "x",
            "b_token": True,
        }


def test_yaml_values_of_every_kind_print(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "date: 2024-01-02\ntime: 2024-01-02 03:04:05\nbytes: !!binary aGk=\nset: !!set {a}\nnan: .nan\n"
        "pairs: !!pairs [a: 1]\n2024-01-02: key\nnull: none\n0.5: half\ncomplex: 1+2j\nbig: 1e400\nu: \u00e9\n"
    )
    config = load_yaml_config(file)
    printed = yaml.safe_load(str(config))
    assert printed["date"] == "2024-01-02"
    assert printed["bytes"] == "b'hi'"
    assert printed["set"] == "{'a'}"
    assert printed["2024-01-02"] == "key"
    assert printed[0.5] == "half"
    assert printed[None] == "none"
    assert printed["u"] == "\u00e9"
    json.dumps({str(key): value for key, value in config.to_yaml_dict().items()})
    assert repr(config) == str(copy.deepcopy(config))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda c: c.l.insert(0, "z"), ["z", "a", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5"]),
        (lambda c: c.l.append(c.t), ["a", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5", "x${AM_TOKEN}"]),
        (
            lambda c: c.l.append([c.t]),
            ["a", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5", ["x${AM_TOKEN}"]],
        ),
        (lambda c: c.l.pop(0), ["${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5"]),
        (lambda c: c.l.__setitem__(0, c.t), ["x${AM_TOKEN}", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5"]),
        (lambda c: c.l.reverse(), ["1e-5", {"x": "${AM_PORT}"}, "${AM_PORT}", "${AM_TOKEN}", "a"]),
        (lambda c: c.l.__setitem__(slice(0, 3), c.l[1:3]), ["${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5"]),
        (lambda c: c.l.extend(c.l[2:3]), ["a", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5", "${AM_PORT}"]),
    ],
)
def test_an_edited_list_still_prints_placeholders(variables, change, shown):
    config = ConfigNode({"l": ["a", "${AM_TOKEN}", "${AM_PORT}", {"x": "${AM_PORT}"}, "1e-5"], "t": "x${AM_TOKEN}"})
    change(config)
    assert config.to_yaml_dict()["l"] == shown
    assert repr(config.l) == str(config.l) == repr(shown)
    assert yaml.safe_load(str(config))["l"] == shown
    assert copy.deepcopy(config).to_yaml_dict()["l"] == shown
    assert [config.l.shown(i) for i in range(2)] == [repr(1e-5 if item == "1e-5" else item) for item in shown[:2]]


def test_slices_and_copies_of_a_list_print_placeholders(variables):
    config = ConfigNode({"l": ["a", "${AM_TOKEN}", "${AM_PORT}"]})
    assert repr(config.l[1:]) == repr(["${AM_TOKEN}", "${AM_PORT}"])
    assert repr(config.l.copy()) == repr(copy.copy(config.l)) == repr(["a", "${AM_TOKEN}", "${AM_PORT}"])
    assert config.l[::-1] == [8080, SECRET, "a"]


def test_items_print_placeholders(variables):
    config = ConfigNode(PLACED | {"password": "hunter22"})
    items = config.items()
    assert dict(items)["number"] == 8080
    assert (len(items), ("number", 8080) in items) == (len(config), True)
    for hidden in (SECRET, "8080", "hunter22"):
        assert hidden not in repr(items)
    assert "'${AM_PORT}'" in repr(items)


def test_a_secret_in_the_text_of_a_mapping_or_list_is_redacted(variables):
    config = ConfigNode(
        {"m": '{"password": "hunter22", "x": 5}', "l": "[{'hf_token': 'hunter22'}, 'y']", "p": "{'x': '1e-5'}"}
    )
    assert config.to_yaml_dict() == {
        "m": {"password": "<redacted>", "x": 5},
        "l": [{"hf_token": "<redacted>"}, "y"],
        "p": "{'x': '1e-5'}",
    }
    assert "hunter22" not in str(config)
    assert config.raw_config["m"] == '{"password": "hunter22", "x": 5}'
    assert config.to_yaml_dict(redact_sensitive=False)["m"] == '{"password": "hunter22", "x": 5}'


def test_no_two_keys_become_one():
    date = datetime.date(2024, 1, 1)
    for raw in ({date: 1, "2024-01-01": 2}, {"2024-01-01": 2, date: 1}):
        printed = ConfigNode({"m": raw}).to_yaml_dict()["m"]
        assert printed == {"2024-01-01": 2, "datetime.date(2024, 1, 1)": 1}
    assert ConfigNode({"m": {date: 1}}).to_yaml_dict()["m"] == {"2024-01-01": 1}
