"""The command line: what it prints, what it imports, and what it says about mistakes."""

import subprocess
import sys

import pytest

from automodel import __version__
from automodel.cli.main import main

HEAVY = ("torch", "transformers", "numpy")


def run_fresh(*words):
    """Run the command in a fresh process that ends by naming the heavy packages it imported."""
    code = (
        "import sys\n"
        "from automodel.cli.main import main\n"
        "try:\n    status = main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    status = stop.code\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])\n"
        "sys.exit(status)\n"
    )
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["env"],
        ["recipes"],
        ["run", "--help"],
        ["recipes", "--help"],
        ["env", "--help"],
        ["embeddings", "--help"],
        [],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(words):
    done = run_fresh(*words)
    assert done.returncode == (0 if words else 2), done.stderr
    assert done.stdout.endswith("HEAVY []\n")


def test_a_recipe_is_loaded_without_heavy_imports():
    code = (
        "import sys\n"
        "from automodel.config.loader import load_yaml_config\n"
        "from automodel.recipes.catalogue import find_recipe\n"
        "config = load_yaml_config(find_recipe('hybrid_tiny'))\n"
        "assert config.model.config.vocab_size == 4096\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"automodel {__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("run", "recipes", "env"))


def test_both_commands_are_installed():
    from importlib.metadata import entry_points

    scripts = {point.name: point.value for point in entry_points(group="console_scripts")}
    assert scripts["automodel"] == scripts["am"] == "automodel.cli.main:main"


def test_recipes_lists_the_shipped_ones(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gdn_tiny", "hybrid_tiny"]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("words", [["hybrid_tiny"], ["run", "hybrid_tiny"], ["run", "gdn_tiny"]], ids=" ".join)
def test_dry_run_prints_the_plan_and_leaves_nothing(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry-run", "--step_scheduler.global_batch_size", "16"]) == 0
    plan = capsys.readouterr().out
    for part in ("parameters", "tokens per step  4,096", "memory", "loss_fn", "MaskedCrossEntropy"):
        assert part in plan
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hybrid_tny"], "no recipe file or shipped recipe 'hybrid_tny' (did you mean 'hybrid_tiny'?)"),
        (["missing/recipe.yaml"], "no recipe file 'missing/recipe.yaml'"),
        (["hybrid_tiny", "--embeding_row_repair.max_rows", "8"], "did you mean 'embedding_row_repair'?"),
        (["hybrid_tiny", "--optimizer.lrr", "1"], "unknown key optimizer.lrr (did you mean 'lr'?)"),
        (
            ["hybrid_tiny", "--step_scheduler.max_steps", "0"],
            "step_scheduler.max_steps must be positive or null, got 0",
        ),
        (["hybrid_tiny", "--distributed.tp_size", "2"], "distributed.tp_size: 2 is not available yet"),
        (["hybrid_tiny", "--packed_sequence.packed_sequence_size", "64"], "'packed_sequence' is not available yet"),
        (["hybrid_tiny", "--model.config.vocab_sise", "64"], "model.config"),
        (["hybrid_tiny", "stray"], "unexpected argument 'stray'"),
        (["hybrid_tiny", "--dryrun"], "unknown option --dryrun (did you mean --dry-run?)"),
        (["hybrid_tiny", "--run_dir=x"], "unknown option --run_dir (did you mean --run-dir?)"),
        (["hybrid_tiny", "--optimizer.lr", "abc"], "optimizer"),
        (["hybrid_tiny", "--model.config.hidden_size", "abc"], "hidden_size"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_are_named_before_anything_is_made(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert main(words) == 2
    assert list(tmp_path.glob("runs/*")) == []


def test_an_error_names_its_place_in_the_recipe(capsys):
    assert main(["hybrid_tiny", "--dry-run", "--optimizer._target_", "torch.optim.AdamX"]) == 2
    assert "optimizer._target_" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["recipes"], ["run", "hybrid_tiny", "--dry-run"], ["env"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_failure(words):
    process = subprocess.Popen(
        [sys.executable, "-m", "automodel", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in error
    assert "Broken pipe" not in error


def test_traceback_on_demand(capsys):
    assert main(["hybrid_tiny", "--dry-run", "--traceback", "--optimizer.lrr", "1"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
