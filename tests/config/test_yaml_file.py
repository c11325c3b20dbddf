import re

import pytest

from automodel.config.yaml_file import YamlFileError, read_yaml_mapping


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
        ("text\n", "{file}: the top level must be a mapping, got a str"),
        ("a: 1\nb: 2\na: 3\n", "{file}:3:1: duplicate key 'a'"),
        ("a:\n  b: 1\n  b: 1\n", "{file}:3:3: duplicate key 'b'"),
        ("a: [{b: 1, b: 2}]\n", "{file}:1:12: duplicate key 'b'"),
        ("1: x\n1: y\n", "{file}:2:1: duplicate key 1"),
        ("a: 1\n\tb: 2\n", "{file}:2:1: "),
        ("a: [1\n", "{file}:2:1: "),
        ("a: !!python/object/apply:os.getcwd []\n", "{file}:1:4: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "{file}:2:1: "),
        ("? [1, 2]\n: 3\n", "{file}:1:3: found unhashable key"),
        ("a: *nowhere\n", "{file}:1:4: found undefined alias"),
        ("a: {<<: 3}\n", "{file}:1:9: << takes mappings only"),
        ("a: 2024-13-45\n", "{file}: month must be in 1..12"),
        (b"a: \xff\n", "{file} is not UTF-8"),
        (b"a: \x00\n", "{file}: "),
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
