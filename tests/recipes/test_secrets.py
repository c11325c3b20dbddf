"""What a job prints and leaves behind holds no secret of its recipe and nothing that the environment gave."""

import os
import subprocess
import sys

import pytest

from automodel.cli.main import main

TEXT = "s3ntinel-text"
LITERAL = "l1teral-s3cret"
NUMBER = "0.0917364519"
FAILING = """
import yaml

def build(**values):
    try:
        yaml.safe_load("{a: [" + str(values["value"]))
    except yaml.YAMLError as error:
        raise ValueError("bad description") from error
"""


@pytest.fixture
def secret_recipe(recipe, monkeypatch):
    """The tiny recipe with values from the environment and literal secrets, where no text of a run needs them."""
    monkeypatch.setenv("AM_TEXT", TEXT)
    monkeypatch.setenv("AM_NUMBER", NUMBER)
    recipe["step_scheduler"].update(max_steps=4, ckpt_every_steps=2, val_every_steps=2)
    recipe["optimizer"]["weight_decay"] = "${AM_NUMBER}"
    recipe["ci"] = {
        "odd": ["${AM_TEXT}", {"deep": "https://me:${AM_TEXT}@host"}],
        "number": "${AM_NUMBER}",
        "hf_token": LITERAL,
        "url": f"https://me:{LITERAL}@host",
        "text": f"{{'password': '{LITERAL}', 'x': 5}}",
        "default": f"${{AM_ABSENT_PASSWORD,{LITERAL}}}",
    }
    return recipe


def test_a_run_prints_and_leaves_no_secret(secret_recipe, tmp_path):
    run_dir, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    command = [sys.executable, "-m", "automodel", "run", secret_recipe.write(), "--run-dir", str(run_dir)]
    command += ["--checkpoint.checkpoint_dir", str(checkpoints)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    files = [file for folder in (run_dir, checkpoints) for file in folder.rglob("*") if file.is_file()]
    assert {"report.html", "training.jsonl", "config.yaml"} <= {file.name for file in files}
    assert any(file.suffix == ".safetensors" for file in files)
    texts = {file: file.read_bytes() for file in files}
    for hidden in (TEXT, LITERAL, NUMBER):
        assert hidden not in done.stdout + done.stderr
        assert [file for file, content in texts.items() if hidden.encode() in content] == []
    assert any(b"${AM_TEXT}" in content for content in texts.values())


def test_a_traceback_shows_no_secret_of_a_cause(secret_recipe, tmp_path, capsys):
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    secret_recipe["model"] = {"_target_": f"{file}:build", "value": "${AM_TEXT}"}
    assert main(["run", secret_recipe.write(), "--dry-run", "--traceback"]) == 2
    printed = capsys.readouterr()
    assert "direct cause" in printed.err
    assert "ParserError" in printed.err
    assert "${AM_TEXT}" in printed.err
    assert TEXT not in printed.out + printed.err
