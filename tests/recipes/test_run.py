"""The main job end to end: what a run leaves behind, how it stops, and that it resumes exactly."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from automodel.cli.main import main
from automodel.observe.metrics import read_rows
from tiny_recipe import TinyRecipe

LONG_ENOUGH = 120


def rows(run_dir, name="training"):
    return read_rows(Path(run_dir) / f"{name}.jsonl")


def losses(run_dir):
    """Step, loss and gradient norm of each row, exactly as recorded."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(run_dir)]


def start(recipe_file, run_dir, *overrides):
    """Start the job as a process of its own."""
    command = [sys.executable, "-m", "automodel", "run", recipe_file, "--run-dir", str(run_dir), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def wait_for_steps(process, run_dir, count):
    """Wait until the process has recorded `count` steps."""
    deadline = time.monotonic() + LONG_ENOUGH
    while time.monotonic() < deadline and process.poll() is None:
        file = Path(run_dir) / "training.jsonl"
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    process.kill()
    pytest.fail(f"the job did not reach {count} steps: {process.communicate()[0]}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus, cache_root):
    """The folder of one run of 20 steps in a process of its own, and what it printed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start(TinyRecipe(corpus, folder / "tiny.yaml").write(), folder / "run")
    output, _ = process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 0, output
    return folder / "run", output


def test_run_leaves_its_folder(uninterrupted):
    run_dir, output = uninterrupted
    training = rows(run_dir)
    assert [row["step"] for row in training] == list(range(20))
    reference_keys = (
        "step epoch timestamp loss grad_norm lr mem tps tps_per_gpu mfu num_tokens_per_step num_label_tokens"
    )
    phases = "time_data time_forward time_backward time_optimizer time_step version"
    assert set(f"{reference_keys} {phases}".split()) <= set(training[0])
    assert training[0]["mfu"] is None
    assert training[0]["num_tokens_per_step"] == 4 * 32
    validation = rows(run_dir, "validation")
    assert [row["step"] for row in validation] == [-1, 9, 19]
    assert abs(validation[0]["val_loss"] - math.log(320)) < 0.2
    assert validation[-1]["val_loss"] < 0.9 * validation[0]["val_loss"]
    assert validation[0]["num_label_tokens"] >= 3_900
    assert (run_dir / "report.html").read_text().count("<svg") >= 4
    assert re.search(r"sample completion:\ndef ", output)
    assert "finished: 20 steps run" in output


def test_checkpoints_have_the_known_layout(uninterrupted):
    checkpoints = uninterrupted[0] / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "LATEST",
        "LOWEST_VAL",
        "epoch_0_step_11",
        "epoch_0_step_17",
        "epoch_0_step_19",
        "epoch_0_step_5",
    ]
    assert (checkpoints / "LATEST").readlink() == Path("epoch_0_step_19")
    last = checkpoints / "LATEST"
    assert {path.name for path in last.iterdir()} == {
        "checkpoint.json",
        "config.yaml",
        "dataloader",
        "losses.json",
        "model",
        "optim",
        "rng",
        "step_scheduler.pt",
    }
    assert (last / "rng/rng_global_rank_0.pt").is_file()
    assert (last / "dataloader/dataloader_dp_rank_0.pt").is_file()
    assert (last / "optim/.metadata").is_file()
    assert list((last / "model").glob("shard-*-model-*.safetensors"))
    assert json.loads((last / "checkpoint.json").read_text())["version"] == 1
    assert json.loads((last / "losses.json").read_text()).keys() == {"train_loss", "val_loss"}
    assert (last / "model/consolidated/config.json").is_file()
    assert (last / "model/consolidated/tokenizer.json").is_file()
    assert not (checkpoints / "epoch_0_step_5/model/consolidated").exists()


def test_killed_run_resumes_bit_for_bit(uninterrupted, recipe, tmp_path):
    process = start(recipe.write(), tmp_path / "run")
    wait_for_steps(process, tmp_path / "run", 9)
    process.kill()
    process.communicate()
    assert len(rows(tmp_path / "run")) < 20
    assert (tmp_path / "run/checkpoints/LATEST").exists()
    process = start(recipe.write(), tmp_path / "run")
    output, _ = process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert losses(tmp_path / "run") == losses(uninterrupted[0])
    assert rows(tmp_path / "run", "validation")[-1]["val_loss"] == rows(uninterrupted[0], "validation")[-1]["val_loss"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_stop_signal_saves_and_exits_cleanly(uninterrupted, recipe, tmp_path, number):
    process = start(recipe.write(), tmp_path / "run")
    wait_for_steps(process, tmp_path / "run", 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 0, output
    assert f"stopped by {number.name}" in output
    stopped_at = len(rows(tmp_path / "run"))
    assert stopped_at < 20
    latest = (tmp_path / "run/checkpoints/LATEST").readlink().name
    assert latest == f"epoch_0_step_{stopped_at - 1}"
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(uninterrupted[0])


def test_finished_run_started_again_trains_nothing(recipe, tmp_path, capsys):
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "2"]
    assert main(command) == 0
    before = losses(tmp_path / "run")
    assert main(command) == 0
    assert "already complete: 0 steps run" in capsys.readouterr().out
    assert losses(tmp_path / "run") == before
    assert main([*command[:-1], "3"]) == 0
    assert [step for step, *_ in losses(tmp_path / "run")] == [0, 1, 2]


def test_checkpoint_dir_outside_the_run_folder_is_resumed_by_the_next_run(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe["checkpoint"] = {"checkpoint_dir": str(tmp_path / "kept")}
    assert main([recipe.write(), "--step_scheduler.max_steps=2"]) == 0
    assert main([recipe.write(), "--step_scheduler.max_steps=4"]) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert [[step for step, *_ in losses(folder)] for folder in folders] == [[0, 1], [2, 3]]


def test_checkpoints_can_be_switched_off(recipe, tmp_path):
    recipe["checkpoint"] = {"enabled": False}
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "1"]) == 0
    assert not (tmp_path / "run/checkpoints").exists()


LOSS_FILE = '''
"""A loss that is not a number at its third call in training."""
import torch
from automodel.training.loss import MaskedCrossEntropy


class Breaks(MaskedCrossEntropy):
    calls = 0

    def forward(self, logits, labels, *, num_label_tokens=None):
        self.calls += 1
        loss = super().forward(logits, labels, num_label_tokens=num_label_tokens)
        return loss * torch.nan if self.calls == 5 else loss
'''


@pytest.fixture
def breaking(recipe, tmp_path):
    """The tiny recipe, with a loss that is NaN in the third step."""
    (tmp_path / "breaks.py").write_text(LOSS_FILE)
    recipe["loss_fn"] = {"_target_": f"{tmp_path / 'breaks.py'}:Breaks"}
    recipe["step_scheduler"].update(max_steps=5, ckpt_every_steps=2, val_at_start=False)
    return recipe


def test_nonfinite_loss_stops_the_run_and_names_everything(breaking, tmp_path, capsys):
    assert main(["run", breaking.write(), "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert "step 3/5: the loss is nan" in message
    assert re.search(r"files of the batch: (json|email)_\w+\.py", message)
    assert "last good checkpoint: " + str(tmp_path / "run/checkpoints") in message
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
    assert "failed: step 3/5" in (tmp_path / "run/report.html").read_text()


def test_nonfinite_loss_can_be_skipped(breaking, tmp_path, caplog):
    breaking["step_scheduler"]["nonfinite_loss"] = "skip"
    assert main(["run", breaking.write(), "--run-dir", str(tmp_path / "run")]) == 0
    training = rows(tmp_path / "run")
    assert [row["skipped"] for row in training] == [False, False, True, False, False]
    assert training[2]["loss"] is None
    assert all(math.isfinite(row["loss"]) for row in training if not row["skipped"])
    assert "the batch is skipped" in caplog.text


def test_secrets_never_reach_the_run_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVATE_CORPUS_KEY", "hunter2-sentinel")
    recipe["ci"] = {"api_key": "${PRIVATE_CORPUS_KEY}", "password": "plain-sentinel"}
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "1"]) == 0
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"hunter2-sentinel" not in content, file
            assert b"plain-sentinel" not in content, file
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["ci"]["api_key"] == "${PRIVATE_CORPUS_KEY}"


def test_a_loader_needs_no_target(recipe, tmp_path):
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "1"]
    assert main([*command, "--dataloader.num_workers", "1", "--validation_dataloader.shuffle", "true"]) == 0
    assert len(rows(tmp_path / "run")) == 1


def test_a_vocabulary_that_is_too_small_is_refused(recipe, tmp_path, capsys):
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--model.config.vocab_size", "100"]
    assert main(command) == 2
    assert "the tokenizer has 320 tokens but the model's vocab_size is 100" in capsys.readouterr().err


def test_deterministic_mode_is_switched_on(recipe, tmp_path):
    recipe["deterministic"] = True
    process = start(recipe.write(), tmp_path / "run", "--step_scheduler.max_steps", "1")
    output, _ = process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 0, output


def test_gated_delta_net_trains(recipe, tmp_path):
    recipe["model"]["config"] = {
        "_target_": "transformers.Qwen3NextConfig",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 0,
        "tie_word_embeddings": True,
    }
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "6"]) == 0
    first, *_, last = rows(tmp_path / "run")
    assert last["loss"] < first["loss"]


def test_training_on_bf16_autocast(recipe, tmp_path):
    recipe["distributed"]["mp_policy"]["param_dtype"] = "bfloat16"
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "2"]) == 0
    assert "bfloat16" in (tmp_path / "run/report.html").read_text()
