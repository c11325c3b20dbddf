import re

import pytest
import yaml

from automodel.config.yaml_file import MAX_BYTES, YamlFileError, read_yaml_mapping


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        file = tmp_path / "recipe.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write_file


def test_plain_values_of_all_kinds(write):
    file = write("a: 1\nb: [x, 2.5, null]\nc: {5: true}\nd: \u00e9\nlr: 1.0e-5\n")
    assert read_yaml_mapping(file) == {"a": 1, "b": ["x", 2.5, None], "c": {5: True}, "d": "\u00e9", "lr": 1e-5}
    assert read_yaml_mapping(str(file))["a"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "{file} is empty"),
        ("# only a comment\n", "{file} is empty"),
        ("- 1\n", "{file}: the top level must be a mapping, got a list"),
        ("text\n", "{file}: the top level must be a mapping, got a single value"),
        ("a: 1\nb: 2\na: 3\n", "{file}:3:1: duplicate key 'a'"),
        ("a:\n  b: 1\n  b: 1\n", "{file}:3:3: duplicate key 'b'"),
        ("a: [{b: 1, b: 2}]\n", "{file}:1:12: duplicate key 'b'"),
        ("1: x\n1: y\n", "{file}:2:1: duplicate key 1"),
        ("a: 1\n\tb: 2\n", "{file}:2:1: "),
        ("a: [1\n", "{file}:2:1: "),
        ("a: !!python/object/apply:os.getcwd []\n", "{file}:1:4: unknown tag '!!python/object/apply:os.getcwd'"),
        ("a: 1\n---\nb: 2\n", "{file}:2:1: "),
        ("? [1, 2]\n: 3\n", "{file}:1:3: found unhashable key"),
        ("a: *nowhere\n", "{file}:1:4: found undefined alias"),
        ("a: {<<: 3}\n", "{file}:1:9: << takes mappings only"),
        ("a: 2024-13-45\n", "{file}:1:4: month must be in 1..12"),
        (b"a: \xff\n", "{file}:1: not UTF-8 (byte 0xff, 3 bytes from the start)"),
        (b"a: 1\nb: \xc3\n", "{file}:2: not UTF-8 (byte 0xc3, 8 bytes from the start)"),
        ("a: 1\nb: !mine x\n", "{file}:2:4: unknown tag '!mine'"),
        ("a: !!bool maybe\n", "{file}:1:4: not a valid !!bool"),
        ("a: !!timestamp x\n", "{file}:1:4: not a valid !!timestamp"),
        ("a: !!int ''\n", "{file}:1:4: "),
        ("a: !!map x\n", "{file}:1:4: expected a mapping"),
        ("a: !!map [x]\n", "{file}:1:4: expected a mapping"),
        ("a: !!seq x\n", "{file}:1:4: expected a list"),
        ("a: !!set x\n", "{file}:1:4: expected a mapping node"),
        ("a: !!omap x\n", "{file}:1:4: expected a sequence"),
        ("a: !!binary \u00e9\n", "{file}:1:4: failed to convert base64 data"),
        ("a: 0x" + "f" * 5000 + "\n", "{file}:1:4: a number of more than 10,000 bits"),
        ("!mine {a: 1}\n", "{file}:1:1: unknown tag '!mine'"),
        ("!!set {a, b}\n", "{file}: the top level must be a plain mapping, got a set"),
        ("null\n", "{file}: the top level must be a mapping, got a single value"),
        ("a: &a [1, *a]\n", "{file}:1:4: an alias refers to the mapping or list that it stands in"),
        ("a: &a {b: {c: *a}}\n", "{file}:1:4: an alias refers to"),
        ("a: &a {<<: *a}\n", "{file}:1:4: an alias refers to"),
        ("a: " + "[" * 500 + "]" * 500 + "\n", "{file}:1:103: mappings and lists are nested more than 100 deep"),
        ("a: " + "[" * 5000 + "\n", "{file}:1:"),
        ("a: " + "9" * 5000 + "\n", "{file}:1:4: Exceeds the limit"),
        (b"a: \x00\n", "{file}:1: the character U+0000 may not stand in YAML"),
    ],
)
def test_what_is_no_readable_mapping_is_refused_with_its_place(write, content, message):
    file = write(content)
    with pytest.raises(YamlFileError, match=re.escape(message.format(file=file))) as caught:
        read_yaml_mapping(file)
    assert isinstance(caught.value, ValueError)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        read_yaml_mapping(tmp_path / "absent.yaml")


# PyYAML itself errs on some of these: own keys win over merged ones, and of several merged mappings the first wins.
@pytest.mark.parametrize("key", ["x", "hidden_size"])
def test_merge_keys(write, key):
    file = write(
        f"a: &a {{{key}: 1}}\n"
        f"b: &b {{{key}: 2, other: 3}}\n"
        f"deep: {{deeper: {{c: &c {{<<: *a, {key}: 4}}}}}}\n"
        "d: {<<: *c, z: 5}\n"
        "e: {<<: [*a, *b]}\n"
        "f: {<<: *a, <<: *b}\n"
    )
    values = read_yaml_mapping(file)
    assert values["a"] == {key: 1}
    assert values["deep"] == {"deeper": {"c": {key: 4}}}
    assert values["d"] == {key: 4, "z": 5}
    assert values["e"] == {key: 1, "other": 3}
    assert values["f"] == {key: 1, "other": 3}


def test_a_byte_order_mark_and_a_lone_equals_sign_are_no_trouble(write):
    assert read_yaml_mapping(write(b"\xef\xbb\xbfa: =\n")) == {"a": "="}


def test_a_file_above_the_limit_is_refused_unread(write):
    with pytest.raises(YamlFileError, match=r"recipe\.yaml is larger than 1,048,576 bytes"):
        read_yaml_mapping(write("a: " + "x" * MAX_BYTES))
    assert len(read_yaml_mapping(write("a: " + "x" * (MAX_BYTES - 3)))["a"]) == MAX_BYTES - 3


def test_an_alias_bomb_is_refused_before_it_is_expanded(write):
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9)]
    message = r"recipe\.yaml:\d+:\d+: more than 100,000 values once aliases are expanded"
    with pytest.raises(YamlFileError, match=message):
        read_yaml_mapping(write("\n".join(lines)))
    # Through merge keys, and deep rather than wide.
    lines = ["m0: &m0 {x: 1, y: 2}"] + [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 9)]
    with pytest.raises(YamlFileError, match=message):
        read_yaml_mapping(write("\n".join(lines)))
    lines = ["d0: &d0 " + "[" * 60 + "]" * 60, "d1: " + "[" * 60 + "*d0" + "]" * 60]
    with pytest.raises(YamlFileError, match="nested more than 100 deep"):
        read_yaml_mapping(write("\n".join(lines)))


def test_an_alias_that_stands_twice_is_two_values(write):
    values = read_yaml_mapping(write("a: &a {x: [1]}\nb: *a\nc: [*a, *a]\n"))
    assert values == {"a": {"x": [1]}, "b": {"x": [1]}, "c": [{"x": [1]}] * 2}


def test_lines_of_keys_and_elements_are_kept(write):
    file = write(
        "# comment\na: 1\nb:\n  c: [x,\n    y]\n  d:\n  - p\n  - {q: 1}\n5: e\n"
        "base: &base\n  z: 1\nm:\n  <<: *base\n  w: 2\n"
    )
    values = read_yaml_mapping(file)
    assert values.file == str(file)
    assert values.lines == {"a": 2, "b": 3, 5: 9, "base": 10, "m": 12}
    assert values["b"].lines == {"c": 4, "d": 6}
    assert values["b"]["c"].lines == [4, 5]
    assert values["b"]["d"].lines == [7, 8]
    assert values["b"]["d"][1].lines == {"q": 8}
    # A merged key keeps the line where it stands.
    assert values["m"].lines == {"z": 11, "w": 14}


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="this build of PyYAML comes without libyaml")
def test_files_are_parsed_by_libyaml_where_it_is_there(write, monkeypatch):
    def refuse(self, *args):
        raise AssertionError("the parser written in Python was asked")

    monkeypatch.setattr(yaml.scanner.Scanner, "check_token", refuse)
    monkeypatch.setattr(yaml.reader.Reader, "__init__", refuse)
    assert read_yaml_mapping(write("a: [1, {b: 2}]\n")) == {"a": [1, {"b": 2}]}
