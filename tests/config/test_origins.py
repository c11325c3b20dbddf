import pytest

from automodel.config.env import Expansion
from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.config.origins import IN_CODE, Origin, Source, in_file


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (Origin(kind="file", file="r.yaml", line=3), "r.yaml:3"),
        (
            Origin(kind="file", file="r.yaml", line=3, variables=("A", "B")),
            "r.yaml:3, environment variable A, environment variable B",
        ),
        (Origin(kind="override", defaults=("A",)), "override, default of A"),
        (IN_CODE, "code"),
    ],
)
def test_origins_read_well(origin, text):
    assert str(origin) == text


def test_a_source_tells_which_variables_stand_in_the_value():
    expansion = Expansion(text="x1y1z", environment=(("A", "1"), ("A", "1")), defaults=("B",))
    source = Source.of_text("x${A}y$A${B,z}", expansion, IN_CODE)
    assert source.origin == Origin(kind="code", variables=("A",), defaults=("B",))
    assert source.holds_placeholder
    assert (source.written, source.text) == ("x${A}y$A${B,z}", "x1y1z")
    assert not Source(origin=IN_CODE, written="$5").holds_placeholder


def test_the_place_in_a_file():
    assert in_file(Source(origin=Origin(kind="file", file="r.yaml", line=3))) == " (r.yaml:3)"
    assert in_file(Source(origin=IN_CODE)) == in_file(None) == ""


def test_every_value_of_a_recipe_has_an_origin(tmp_path, monkeypatch):
    monkeypatch.setenv("AM_X", "5")
    monkeypatch.delenv("AM_MISSING", raising=False)
    file = tmp_path / "r.yaml"
    file.write_text(
        "a:\n  b: [1, '${AM_X}',\n    {c: '${AM_MISSING,2}'}]\n5: five\nbase: &base {z: 1}\nm:\n  <<: *base\n"
    )
    config = load_yaml_config(file)
    config.set_by_dotted("a.b.0", 7, origin=Origin(kind="override"))
    config.set_by_dotted("new.deep", {"er": [1]}, origin=Origin(kind="override"))
    config.code = "$AM_X"
    at = {
        name: str(config.origin(name)).replace(f"{file}:", "line ")
        for name in ["a", "a.b", "a.b.1", "a.b.2", "a.b.2.c"]
    }
    assert at == {
        "a": "line 1",
        "a.b": "line 2",
        "a.b.1": "line 2, environment variable AM_X",
        "a.b.2": "line 3",
        "a.b.2.c": "line 3, default of AM_MISSING",
    }
    assert config.origin(5).line == config.origin("5").line == 4
    assert config.origin("m.z").line == 5
    for name in ("a.b.0", "new", "new.deep", "new.deep.er", "new.deep.er.0"):
        assert config.origin(name) == Origin(kind="override"), name
    assert config.origin("code") == Origin(kind="code", variables=("AM_X",))
    assert config.a.origin("b.1").variables == ("AM_X",)
    with pytest.raises(KeyError, match=r"no 'a\.z'"):
        config.origin("a.z")


def test_origins_survive_copies():
    config = ConfigNode({"a": [1]}, origin=Origin(kind="override"))
    other = ConfigNode({})
    other.b = config
    assert other.origin("b.a.0") == Origin(kind="override")
