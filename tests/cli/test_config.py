"""`automodel config`: what it prints, what it keeps to itself, and what it says about mistakes."""

import json
import subprocess
import sys

import pytest
import yaml

from automodel.cli.main import main
from automodel.recipes.schema import KNOWN_SECTIONS

HEAVY = ("torch", "transformers", "numpy")


@pytest.mark.parametrize("words", [["--help"], ["schema", "--help"], ["show", "--help"], ["schema", "step_scheduler"]])
def test_light_commands_import_nothing_heavy(words):
    code = (
        "import sys\nfrom automodel.cli.main import main\n"
        "try:\n    main(['config', *sys.argv[1:]])\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("HEAVY []\n")


def printed(capsys, *words, status=0):
    assert main(["config", *words]) == status
    return capsys.readouterr()


def test_the_schema_has_every_section_and_fits_a_terminal(capsys):
    out = printed(capsys, "schema").out
    heads = {block.splitlines()[0].replace(" ", ":").split(":")[0] for block in out.split("\n\n")}
    assert heads == KNOWN_SECTIONS
    assert max(map(len, out.splitlines())) <= 100
    for part in (
        "peft - not available yet: adapters",
        "optimizer - required: the optimizer",
        "  off: left out, null, or wandb.enable: false",
        "_target_: automodel.training.loss.MaskedCrossEntropy",
        "  max_steps                    null   integer or null: optimizer steps after which training ends",
        "available so far: null, 1",
    ):
        assert part in out


def test_the_schema_of_a_target_has_its_arguments(capsys):
    out = printed(capsys, "schema", "dataset").out
    assert "_target_: automodel.data.text.TextFilesDataset" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["context_length"]]
    assert "required" in line
    assert "integer" in line
    assert "tokenizer " not in out


def test_the_schema_as_json(capsys):
    (section,) = json.loads(printed(capsys, "schema", "lr_scheduler", "--json").out)
    keys = {setting["key"]: setting for setting in section["settings"]}
    assert section["kind"] == "settings"
    assert keys["min_lr"]["default"] == 0.0
    assert keys["lr_decay_steps"] | {"help": ""} == {
        "key": "lr_decay_steps",
        "type": "integer or null",
        "default": None,
        "help": "",
        "required": False,
        "available": None,
    }
    assert {section["name"] for section in json.loads(printed(capsys, "schema", "--json").out)} == KNOWN_SECTIONS


RECIPE = """
step_scheduler:
  max_steps: 5
model:
  _target_: am_absent.model
  hf_token: ${AM_TOKEN}
  password: hunter22
  size: ${AM_SIZE,64}
  names: [a, "b c"]
  parts:
    - {x: 1, y: [1, {z: 2}]}
    - text
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("AM_TOKEN", "swordfish")
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


def test_show_prints_yaml_with_the_origin_of_each_value(recipe, capsys):
    out = printed(capsys, "show", recipe, "--step_scheduler.val_every_steps=3").out
    shown = yaml.safe_load(out)
    assert shown["model"] == {
        "_target_": "am_absent.model",
        "hf_token": "${AM_TOKEN}",
        "password": "<redacted>",
        "size": 64,
        "names": ["a", "b c"],
        "parts": [{"x": 1, "y": [1, {"z": 2}]}, "text"],
    }
    assert shown["step_scheduler"]["val_every_steps"] == 3
    assert shown["checkpoint"]["save_consolidated"] == "final"
    comments = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in out.splitlines()}
    assert comments["max_steps"] == "line 3"
    assert comments["val_every_steps"] == "override"
    assert comments["hf_token"] == "environment AM_TOKEN, line 6"
    assert comments["size"] == "AM_SIZE is not set, line 8"
    assert comments["num_epochs"] == "default"
    assert "swordfish" not in out
    assert "hunter22" not in out
    assert out.startswith(f"# {recipe}\n")
    columns = {line.index("  # ") for line in out.splitlines() if "  # " in line}
    assert len(columns) == 1
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_show_as_json(recipe, capsys):
    values = json.loads(printed(capsys, "show", recipe, "--json", "--no-defaults").out)
    by_path = {value["path"]: value for value in values}
    assert by_path["model.hf_token"]["value"] == "${AM_TOKEN}"
    assert by_path["model.hf_token"]["origin"]["variables"] == ["AM_TOKEN"]
    assert by_path["step_scheduler.max_steps"]["origin"]["line"] == 3
    assert by_path["model.parts.0.y.1.z"]["value"] == 2
    assert "step_scheduler.num_epochs" not in by_path
    with_defaults = json.loads(printed(capsys, "show", recipe, "--json").out)
    assert {"path": "rng.seed", "value": 42, "origin": {"kind": "default"}} in with_defaults


@pytest.mark.parametrize("name", ["hybrid_tiny", "gdn_tiny"])
def test_the_shipped_recipes_are_shown_as_they_are(name, capsys):
    from automodel.recipes.catalogue import find_recipe

    out = printed(capsys, "show", name, "--no-defaults").out
    assert yaml.safe_load(out) == yaml.safe_load(find_recipe(name).read_text())
    assert max(map(len, out.splitlines()[1:])) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schema", "optimizr"], "unknown section 'optimizr' (did you mean 'optimizer'?)"),
        (["schema", "model", "extra"], "unexpected argument 'extra': config schema takes one SECTION"),
        (["show", "hybrid_tny"], "no recipe file or shipped recipe 'hybrid_tny'"),
        (["show", "hybrid_tiny", "stray"], "unexpected argument 'stray'"),
        (["show", "hybrid_tiny", "--optimizr.lr=1"], "unknown section 'optimizr' (did you mean 'optimizer'?)"),
        (["show", "hybrid_tiny", "--rng.sed=1"], "unknown key rng.sed (did you mean 'seed'?)"),
        (["show", "hybrid_tiny", "--optimizer.lrr=1"], "unknown key optimizer.lrr (did you mean 'lr'?)"),
        (["show", "hybrid_tiny", "--optimizer.lr.x=1"], "cannot set 'optimizer.lr.x'"),
        (["show", "hybrid_tiny", "--deterministic=5"], "deterministic must be true or false, got 5"),
        (["show", "hybrid_tiny", "--recipe=Nope"], "unknown recipe 'Nope'"),
        (["show", "hybrid_tiny", "--recipe=5"], "recipe must be the name of a recipe class"),
        (["show", "hybrid_tiny", f"--rng.{'9' * 5000}=1"], "unknown key rng.999"),
        (["show", "hybrid_tiny", f"--model.config.layers_block_type.{'9' * 5000}=1"], "cannot set"),
        (["show", "hybrid_tiny", "--distributed.tp_size=2"], "distributed.tp_size: 2 is not available yet"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named(words, message, capsys):
    err = printed(capsys, *words, status=2).err
    assert f"error: {message}" in err or message in err
    assert "Traceback" not in err


def test_the_class_of_a_recipe_is_not_imported_to_show_it(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text("recipe: am_absent.recipes.Mine\n")
    assert "recipe: am_absent.recipes.Mine" in printed(capsys, "show", str(file)).out


@pytest.mark.parametrize(
    ("key", "message"),
    [("2024-01-01", "unknown section '2024-01-01'"), ("!!binary aGk=", "unknown section \"b'hi'\"")],
)
def test_a_section_whose_name_is_no_string_is_named(tmp_path, capsys, key, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{key}: {{a: 1}}\n")
    assert message in printed(capsys, "show", str(file), status=2).err
    file.write_text(f"model: {{_target_: am_absent.model, {key}: {{{key}: 1}}}}\n")
    assert printed(capsys, "show", str(file)).err == ""


@pytest.mark.parametrize(
    "words", [["--rng.sed=1"], ["--seed", "3"], ["--model._target_=5"], ["--model._target_", "os.nope"]], ids=" ".join
)
def test_a_mistake_in_an_override_says_that_it_is_one(capsys, words):
    err = printed(capsys, "show", "hybrid_tiny", *words, status=2).err
    assert err.splitlines()[-1] == "  in a command-line override"


def test_an_action_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["config"])
    assert stop.value.code == 2
    assert "ACTION" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--model.config.vocab_size", "abc"],
        ["--model.config.num_attention_heads", "0"],
        ["--model.config.hidden_size", "-5"],
        ["--model._target_", "os.getcwd"],
        ["--optimizer.betas", "5"],
        ["--optimizer.lr", "abc"],
    ],
    ids=" ".join,
)
def test_whatever_a_target_raises_over_a_wrong_argument_becomes_a_message(words, capsys):
    assert main(["run", "hybrid_tiny", "--dry-run", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err
