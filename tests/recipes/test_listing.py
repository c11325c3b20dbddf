import datetime

from automodel.config.loader import load_yaml_config
from automodel.config.overrides import apply_overrides, parse_overrides
from automodel.recipes.listing import Position, list_values

RECIPE = """
step_scheduler:
  max_steps: "5"
rng: null
model:
  _target_: am_absent.model
  token: ${AM_TOKEN}
  hidden: ${AM_HIDDEN,64}
  url: https://me:hunter22@host
  sizes: [1, 2, 3]
  mixed: [a, "${AM_TOKEN}"]
  parts:
    - {x: 1}
    - y
  empty: {}
  nothing: []
  5: five
"""


def listed(tmp_path, *words, **options):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    config = load_yaml_config(file)
    apply_overrides(config, parse_overrides(words))
    return {value.dotted: value for value in list_values(config, **options)}


def test_every_value_is_listed_with_its_origin(tmp_path, monkeypatch):
    monkeypatch.setenv("AM_TOKEN", "swordfish")
    values = listed(tmp_path, "--model.sizes.1=9", "--model.new.key=x", with_defaults=False)
    assert {name: value.value for name, value in values.items()} == {
        "step_scheduler.max_steps": 5,
        "rng": None,
        "model._target_": "am_absent.model",
        "model.token": "${AM_TOKEN}",
        "model.hidden": 64,
        "model.url": "https://me:<redacted>@host",
        "model.sizes.0": 1,
        "model.sizes.1": 9,
        "model.sizes.2": 3,
        "model.mixed.0": "a",
        "model.mixed.1": "${AM_TOKEN}",
        "model.parts.0.x": 1,
        "model.parts.1": "y",
        "model.empty": {},
        "model.nothing": [],
        "model.5": "five",
        "model.new.key": "x",
    }
    assert values["model.token"].origin.variables == ("AM_TOKEN",)
    assert values["model.hidden"].origin.defaults == ("AM_HIDDEN",)
    assert (values["model.url"].origin.file, values["model.url"].origin.line) == (str(tmp_path / "recipe.yaml"), 9)
    assert values["model.sizes.1"].origin.kind == values["model.new.key"].origin.kind == "override"
    assert values["model.sizes.0"].origin.line == 10
    assert isinstance(values["model.sizes.0"].path[-1], Position)
    assert not isinstance(values["model.5"].path[-1], Position)


def test_a_plain_list_is_one_value(tmp_path, monkeypatch):
    monkeypatch.setenv("AM_TOKEN", "swordfish")
    assert listed(tmp_path)["model.sizes"].value == [1, 2, 3]


def test_the_environment_is_not_in_the_list_whatever_its_type(tmp_path, monkeypatch):
    for secret in ("swordfish", "74189", "[74189]", "true"):
        monkeypatch.setenv("AM_TOKEN", secret)
        monkeypatch.setenv("AM_HIDDEN", secret)
        values = listed(tmp_path)
        assert values["model.hidden"].value == "${AM_HIDDEN,64}"
        assert secret not in str([value for name, value in values.items() if name.startswith("model")])


def test_defaults_follow_the_keys_of_their_section_and_end_the_list(tmp_path, monkeypatch):
    monkeypatch.setenv("AM_TOKEN", "x")
    values = listed(tmp_path)
    names = list(values)
    assert names[:2] == ["step_scheduler.max_steps", "step_scheduler.global_batch_size"]
    assert values["step_scheduler.global_batch_size"].origin is None
    assert (values["rng.seed"].value, values["rng.seed"].origin) == (42, None)
    assert "rng" not in values
    assert values["distributed.mp_policy.cast_forward_inputs"].value is True
    assert "distributed.mp_policy" not in values
    assert names.index("rng.seed") < names.index("model.token") < names.index("checkpoint.enabled")


def test_keys_that_are_no_strings_are_listed(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model:\n  2024-01-01: {x: 1}\n  '2024-01-01': 2\n  !!binary aGk=: 3\n  5: 4\n2025-02-02: 6\n")
    values = {value.path: value.value for value in list_values(load_yaml_config(file), with_defaults=False)}
    assert values == {
        ("model", datetime.date(2024, 1, 1), "x"): 1,
        ("model", "2024-01-01"): 2,
        ("model", b"hi"): 3,
        ("model", 5): 4,
        (datetime.date(2025, 2, 2),): 6,
    }
