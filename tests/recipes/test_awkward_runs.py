"""The main job where something is awkward: other processes, signals at odd moments, changed recipes, damaged files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from automodel.caches.folder_lock import FolderLock
from automodel.cli.main import main
from automodel.observe.metrics import read_rows
from tiny_recipe import TinyRecipe

LONG_ENOUGH = 120
QUIET = ["--step_scheduler.val_at_start", "false", "--step_scheduler.val_every_steps", "null"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, cache_root):
    """The folder of a finished run of two steps, and its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = TinyRecipe(corpus, folder / "tiny.yaml")
    recipe["step_scheduler"].update(max_steps=2, val_at_start=False)
    assert main(["run", recipe.write(), "--run-dir", str(folder / "run")]) == 0
    return folder / "run", str(recipe.file)


@pytest.fixture
def again(finished, tmp_path):
    """A copy of the finished run, and a function that starts it again with overrides."""
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True)

    def start(*overrides):
        return main(["run", finished[1], "--run-dir", str(tmp_path / "run"), *overrides])

    start.folder = tmp_path / "run"
    return start


def steps(folder):
    return [row["step"] for row in read_rows(folder / "training.jsonl")]


def contents_and_times(folder):
    """What each file below a folder holds, and when it was last written."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def write_loss(folder, body):
    """A loss in a file of the user's own that does something at each call; returns its target."""
    file = folder / "loss.py"
    file.write_text(
        "import gc, os, signal, torch\n"
        "from automodel.training.loss import MaskedCrossEntropy\n"
        "class Loss(MaskedCrossEntropy):\n"
        "    calls = 0\n"
        "    def forward(self, logits, labels, *, num_label_tokens=None):\n"
        "        self.calls += 1\n"
        f"        {body}\n"
        "        return super().forward(logits, labels, num_label_tokens=num_label_tokens)\n"
    )
    return f"{file}:Loss"


def test_a_rank_that_cannot_find_the_others_leaves_nothing(recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert main([recipe.write()]) == 2
    message = "environment variable MASTER_ADDR is not set: the 2 ranks meet there"
    assert f"error: [rank 1] {message}" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_stop_signal_to_the_whole_process_group_leaves_the_data_workers_alone(recipe, tmp_path):
    recipe["dataloader"] = {"_target_": "automodel.data.loader.StatefulDataLoader", "num_workers": 2}
    recipe["step_scheduler"]["max_steps"] = 400
    process = subprocess.Popen(
        [sys.executable, "-m", "automodel", "run", recipe.write(), "--run-dir", str(tmp_path / "run"), *QUIET],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + LONG_ENOUGH
    while not (tmp_path / "run/training.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG_ENOUGH)
    assert process.returncode == 0, output
    assert "stopped by SIGTERM" in output
    assert (tmp_path / "run/checkpoints/LATEST").exists()


def test_a_folder_of_checkpoints_serves_one_run_at_a_time(recipe, tmp_path, capsys):
    lock = FolderLock(tmp_path / "kept")
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run")]
    assert main([*command, "--checkpoint.checkpoint_dir", str(tmp_path / "kept")]) == 2
    assert f"another process is working in {tmp_path / 'kept'}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    lock.close()


def test_a_folder_of_checkpoints_that_cannot_be_made_is_found_before_training(recipe, tmp_path, capsys):
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run")]
    assert main([*command, "--checkpoint.checkpoint_dir", "/proc/checkpoints"]) == 2
    assert "/proc/checkpoints" in capsys.readouterr().err


def test_a_run_beyond_its_end_is_complete(again, capsys):
    assert again("--step_scheduler.max_steps", "1") == 0
    assert "already complete: 0 steps run" in capsys.readouterr().out
    assert steps(again.folder) == [0, 1]


def test_a_final_validation_that_is_missing_is_made_up_for(recipe, tmp_path, capsys):
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "2", *QUIET]
    assert main([*command, "--validation_dataset", "null"]) == 0
    assert not (tmp_path / "run/checkpoints/LOWEST_VAL").exists()
    before = contents_and_times(tmp_path / "run/checkpoints")
    trained = before.pop("epoch_0_step_1/losses.json")[0]
    capsys.readouterr()
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "already complete: 0 steps run, val_loss" in output
    assert "sample completion" in output
    assert [row["step"] for row in read_rows(tmp_path / "run/validation.jsonl")] == [1]
    after = contents_and_times(tmp_path / "run/checkpoints")
    losses = json.loads(after.pop("epoch_0_step_1/losses.json")[0])
    assert losses["val_loss"] > 0
    assert {**json.loads(trained), "val_loss": losses["val_loss"]} == losses
    assert after == before, "the only checkpoint was written again"
    assert str((tmp_path / "run/checkpoints/LOWEST_VAL").readlink()) == "epoch_0_step_1"


def test_a_validation_made_up_for_elsewhere_changes_nothing_of_the_other_run(again, tmp_path, capsys):
    before = contents_and_times(again.folder)
    there = again.folder / "checkpoints/epoch_0_step_1"
    assert again("--run-dir", str(tmp_path / "own"), "--checkpoint.restore_from", str(there)) == 0
    assert "already complete: 0 steps run, val_loss" in capsys.readouterr().out
    assert contents_and_times(again.folder) == before
    own = tmp_path / "own/checkpoints"
    assert "val_loss" in json.loads((own / "epoch_0_step_1/losses.json").read_text())
    assert str((own / "LATEST").readlink()) == "epoch_0_step_1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optimizer._target_", "torch.optim.SGD"], "cannot be restored: Missing key"),
        (["--rng.seed", "8"], "seed is 7 in the state but 8 here"),
        (["--step_scheduler.global_batch_size", "8"], "keep the dataset and step_scheduler.global_batch_size"),
    ],
    ids=["optimizer", "seed", "batch"],
)
def test_a_recipe_that_a_checkpoint_does_not_fit_is_refused_and_nothing_changes(again, capsys, overrides, message):
    before = {file: file.read_bytes() for file in again.folder.rglob("*") if file.is_file()}
    assert again("--step_scheduler.max_steps", "4", *overrides) == 2
    assert message in capsys.readouterr().err
    assert {file: file.read_bytes() for file in again.folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["model/shard-*.safetensors", "rng/*.pt", "step_scheduler.pt", "optim/.metadata"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_checkpoint_is_named(again, capsys, name, damage):
    (file,) = (again.folder / "checkpoints/epoch_0_step_1").glob(name)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    else:
        file.unlink()
    assert again("--step_scheduler.max_steps", "3") == 2
    message = capsys.readouterr().err
    assert f"the checkpoint {again.folder / 'checkpoints/epoch_0_step_1'} cannot be restored" in message
    assert "name another one with checkpoint.restore_from" in message


def test_another_model_starts_afresh_and_loses_nothing(again, caplog):
    assert again("--model.config.hidden_size", "48") == 0
    assert "holds another model and is not resumed" in caplog.text
    assert (again.folder / "checkpoints/epoch_0_step_1.other-1/checkpoint.json").is_file()
    assert (again.folder / "training.jsonl.1").is_file()
    assert steps(again.folder) == [0, 1]


def test_a_broken_row_of_metrics_does_not_keep_a_run_from_resuming(again, caplog):
    file = again.folder / "training.jsonl"
    file.write_text("garbage\n" + file.read_text())
    assert again("--step_scheduler.max_steps", "3") == 0
    assert "training.jsonl, line 1: not a JSON object" in caplog.text
    assert steps(again.folder) == [2]
    assert (again.folder / "training.jsonl.1").read_text().startswith("garbage")


def test_a_signal_before_the_first_step_leaves_no_checkpoint(recipe, tmp_path, capsys):
    recipe["loss_fn"] = {"_target_": write_loss(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")}
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run")]) == 0
    assert "stopped by SIGTERM before the first step: 0 steps run" in capsys.readouterr().out
    assert not (tmp_path / "run/training.jsonl").exists()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_second_interrupt_stops_at_once(recipe, tmp_path, capsys):
    twice = "[os.kill(os.getpid(), signal.SIGINT) for _ in range(2 * (self.calls == 3))]"
    recipe["loss_fn"] = {"_target_": write_loss(tmp_path, twice)}
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), *QUIET]) == 130
    assert "interrupted twice" in capsys.readouterr().err
    assert steps(tmp_path / "run") == [0]


def test_the_text_of_a_foreign_error_stays_out_of_the_report(recipe, tmp_path):
    recipe["loss_fn"] = {"_target_": write_loss(tmp_path, "raise RuntimeError('sentinel-' + 'text')")}
    with pytest.raises(RuntimeError, match="sentinel-text"):
        main(["run", recipe.write(), "--run-dir", str(tmp_path / "run"), *QUIET])
    report = (tmp_path / "run/report.html").read_text()
    assert "failed: RuntimeError" in report
    assert "sentinel-text" not in report


def test_settings_of_the_process_hold_in_the_loop(recipe, tmp_path):
    checks = (
        "from automodel_kernels.tuning.policy import current_settings;"
        " assert torch.are_deterministic_algorithms_enabled() and not gc.isenabled();"
        " assert current_settings() == (None, None, 'error', True)"
    )
    recipe["loss_fn"] = {"_target_": write_loss(tmp_path, checks)}
    recipe["step_scheduler"].update(max_steps=2, gc_every_steps=1)
    recipe["deterministic"] = True
    recipe["kernels"] = {"tuning": "error", "bit_exact": True}
    done = subprocess.run(
        [sys.executable, "-m", "automodel", "run", recipe.write(), "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_ENOUGH,
    )
    assert done.returncode == 0, done.stderr


def test_output_that_nobody_reads_does_not_fail_a_run(recipe, tmp_path):
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "automodel", "run", recipe.write(), "--run-dir", str(tmp_path / "run")],
            *["--step_scheduler.max_steps", "1", *QUIET],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=LONG_ENOUGH) == 0, error
    assert "Traceback" not in error
    assert steps(tmp_path / "run") == [0]


def test_a_second_run_takes_tokenizer_and_tokens_from_the_cache(recipe, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    command = ["run", recipe.write(), "--step_scheduler.max_steps", "1", *QUIET, "--run-dir"]
    assert main([*command, str(tmp_path / "one")]) == 0
    assert "trained a tokenizer" in caplog.text
    assert "tokenised 25 files" in caplog.text
    caplog.clear()
    assert main([*command, str(tmp_path / "two")]) == 0
    assert "trained a tokenizer" not in caplog.text
    assert "tokenised" not in caplog.text


def test_a_sample_that_fails_does_not_fail_the_run(recipe, tmp_path, caplog):
    (tmp_path / "mute.py").write_text(
        "from automodel.data.tokenizer import train_byte_level_bpe\n"
        "def mute(source):\n"
        "    tokenizer = train_byte_level_bpe(source, vocab_size=320)\n"
        "    tokenizer.encode = None\n"
        "    return tokenizer\n"
    )
    recipe["tokenizer"] = {"_target_": f"{tmp_path / 'mute.py'}:mute", "source": recipe["dataset"]["source"]}
    command = ["run", recipe.write(), "--run-dir", str(tmp_path / "run"), "--step_scheduler.max_steps", "1"]
    assert main(command) == 0
    assert "no sample completion of 'def '" in caplog.text
