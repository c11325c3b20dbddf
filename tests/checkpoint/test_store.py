"""Checkpointer: exact resumption, what a directory holds, whose it is, and what a failed save leaves behind."""

import copy
import json
import os
import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from automodel.checkpoint.directories import find_complete_checkpoints, find_latest_checkpoint
from automodel.checkpoint.store import FORMAT_VERSION, CheckpointConfig, CheckpointSaveError
from small_disks import mounted_tmpfs


def tiny_llama(**changes):
    keys = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"vocab_size": 16, "max_position_embeddings": 16, "attention_dropout": 0.2}
    return LlamaForCausalLM(LlamaConfig(**{**keys, **sizes, **changes})).train()


def assert_same(left, right):
    """Compare two nested states bit by bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def everything(run):
    state = run.state
    parts = {
        "model": dict(state.model.state_dict()),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.step_scheduler.state_dict(),
        "rng": state.rng.state_dict(),
        "loader": state.dataloader.state_dict(),
    }
    return copy.deepcopy(parts)


@pytest.mark.parametrize("kind", ["two groups", "tied", "llama", "tied llama", "momentum", "plain SGD"])
def test_a_restored_run_goes_on_bit_by_bit(tiny_run, tiny_model, checkpointer, kind):
    models = {
        "tied": lambda: tiny_model(tied=True),
        "llama": tiny_llama,
        "tied llama": lambda: tiny_llama(tie_word_embeddings=True),
    }
    optimizers = {
        "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        "plain SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr),
    }
    make_model, optimizer = models.get(kind, tiny_model), optimizers.get(kind, torch.optim.AdamW)
    torch.manual_seed(1)
    run = tiny_run(make_model(), optimizer_class=optimizer)
    assert len(run.optimizer.param_groups) == 2
    run.train(12)
    run.optimizer.param_groups[1]["lr"] = 0.01
    directory = checkpointer().save(run.state, losses={"train_loss": 1.0}, final=False)
    assert directory.name == "epoch_1_step_11", "epochs of ten steps, counted from 0"
    saved = everything(run)
    expected = run.train(3)

    torch.manual_seed(99)
    resumed = tiny_run(make_model(), optimizer_class=optimizer)
    store = checkpointer()
    assert store.find_resumable(resumed.model) == directory
    store.restore(directory, resumed.state)
    assert_same(everything(resumed), saved)
    assert resumed.train(3) == expected
    assert_same(everything(resumed), everything(run))


def test_saving_changes_nothing_of_the_run(tiny_run, checkpointer):
    run = tiny_run()
    run.train(4)
    before = everything(run)
    checkpointer(save_consolidated="every").save(run.state, losses={}, final=True)
    assert_same(everything(run), before)


def test_what_a_checkpoint_holds(tiny_run, checkpointer):
    run = tiny_run()
    run.train(2)
    directory = checkpointer().save(run.state, losses={"train_loss": 1.5, "val_loss": 2.5}, final=False)
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert names >= {
        "checkpoint.json",
        "config.yaml",
        "losses.json",
        "step_scheduler.pt",
        "rng/rng_global_rank_0.pt",
        "dataloader/dataloader_dp_rank_0.pt",
        "optim/.metadata",
        "optim/__0_0.distcp",
    }
    assert [name for name in names if name.startswith("model/shard-") and name.endswith(".safetensors")]
    assert ".incomplete" not in names
    assert (directory / "config.yaml").read_text() == "seed: 7\n"
    assert json.loads((directory / "losses.json").read_text()) == {"train_loss": 1.5, "val_loss": 2.5}
    manifest = json.loads((directory / "checkpoint.json").read_text())
    assert manifest["format"] == "automodel-checkpoint"
    assert (manifest["version"], manifest["step"], manifest["epoch"]) == (FORMAT_VERSION, 1, 0)
    assert str((directory.parent / "LATEST").readlink()) == directory.name


def test_the_consolidated_copy_loads_in_plain_transformers(tiny_run, checkpointer):
    for tied in (False, True):
        run = tiny_run(tiny_llama(tie_word_embeddings=tied))
        run.train(2)
        directory = checkpointer(save_consolidated="final").save(run.state, losses={}, final=True)
        loaded = AutoModelForCausalLM.from_pretrained(directory / "model" / "consolidated")
        ids = torch.arange(8)[None]
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, run.model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("setting", "final", "expected"),
    [(False, True, False), ("final", False, False), ("final", True, True), ("every", False, True), (True, False, True)],
)
def test_which_checkpoints_hold_the_consolidated_copy(setting, final, expected):
    assert CheckpointConfig(save_consolidated=setting).wants_consolidated(final=final) is expected


def test_a_model_that_transformers_does_not_know_has_no_consolidated_copy(tiny_run, checkpointer):
    directory = checkpointer(save_consolidated="every").save(tiny_run().state, losses={}, final=True)
    assert not (directory / "model" / "consolidated").exists()


def test_the_number_of_checkpoints_to_keep_is_positive():
    with pytest.raises(ValueError, match=r"checkpoint\.max_recent_checkpoints must be positive or null, got 0"):
        CheckpointConfig(max_recent_checkpoints=0)


def test_the_remains_of_an_interrupted_save_are_passed_over_and_overwritten(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer()
    first = save_at(store, run, 1)
    remains = first.with_name("epoch_0_step_2")
    (remains / "model" / "half").mkdir(parents=True)
    (remains / ".incomplete").touch()
    (remains / "checkpoint.json").write_text("{")
    assert store.find_resumable(run.model) == first
    assert save_at(store, run, 2) == remains
    assert not (remains / "model" / "half").exists()
    assert store.find_resumable(run.model) == remains
    store.restore(remains, tiny_run().state)


def test_another_models_checkpoint_is_passed_over_with_a_warning(tiny_run, tiny_model, checkpointer, save_at, caplog):
    store, run = checkpointer(), tiny_run()
    other = tiny_run(tiny_model(16))
    ours = save_at(store, run, 3)
    theirs = save_at(store, other, 8)
    assert store.find_resumable(run.model) == ours
    assert f"{theirs} holds another model" in caplog.text
    assert store.find_resumable(tiny_run(tiny_model(32)).model) is None
    with pytest.raises(ValueError, match="epoch_0_step_8 holds another model"):
        store.restore(theirs, run.state)


def test_another_models_checkpoint_is_moved_aside_and_never_removed(
    tiny_run, tiny_model, checkpointer, save_at, caplog
):
    other, run = tiny_run(tiny_model(16)), tiny_run()
    for step in (1, 4, 9):
        save_at(checkpointer(), other, step)
    store = checkpointer(max_recent_checkpoints=1)
    for step in (4, 5, 6):
        last = save_at(store, run, step)
    names = {path.name for path in store.root.iterdir() if path.is_dir() and not path.is_symlink()}
    assert names == {"epoch_0_step_1", "epoch_0_step_4.other-1", "epoch_0_step_6", "epoch_0_step_9"}
    assert "epoch_0_step_4 is not a checkpoint of this model; it is kept as epoch_0_step_4.other-1" in caplog.text
    for name in names - {last.name}:
        store.restore(store.root / name, tiny_run(tiny_model(16)).state)
    assert store.find_resumable(run.model) == last
    save_at(checkpointer(), other, 6)
    save_at(store, run, 4)
    assert (store.root / "epoch_0_step_4.other-1").is_dir()
    assert (store.root / "epoch_0_step_6.other-1").is_dir()


def rewrite_manifest(directory, **changes):
    file = directory / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_newer_format_is_refused_and_kept(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer(max_recent_checkpoints=1)
    directory = save_at(store, run, 1)
    rewrite_manifest(directory, version=FORMAT_VERSION + 1)
    for refused in (lambda: store.find_resumable(run.model), lambda: store.restore(directory, run.state)):
        with pytest.raises(ValueError, match=f"epoch_0_step_1 has format version {FORMAT_VERSION + 1}"):
            refused()
    save_at(store, run, 2)
    save_at(store, run, 3)
    assert [path.name for path in find_complete_checkpoints(store.root)] == ["epoch_0_step_1", "epoch_0_step_3"]
    save_at(store, run, 1)
    assert (store.root / "epoch_0_step_1.other-1").is_dir()


def test_a_damaged_manifest_is_named(tiny_run, checkpointer, save_at):
    directory = save_at(checkpointer(), tiny_run(), 1)
    (directory / "checkpoint.json").write_text('{"version": ')
    with pytest.raises(ValueError, match=r"epoch_0_step_1/checkpoint\.json is damaged"):
        checkpointer().find_resumable(tiny_run().model)


@pytest.mark.parametrize("text", ["{}", "[]"])
def test_a_damaged_manifest_among_older_ones_does_not_fail_a_good_save(tiny_run, checkpointer, save_at, caplog, text):
    run, store = tiny_run(), checkpointer(max_recent_checkpoints=1)
    damaged = save_at(store, run, 1)
    (damaged / "checkpoint.json").write_text(text)
    assert save_at(store, run, 2) == find_latest_checkpoint(store.root)
    assert f"{damaged} is left alone: {damaged}/checkpoint.json is damaged" in caplog.text
    assert damaged.is_dir()
    with pytest.raises(ValueError, match=r"epoch_0_step_1/checkpoint\.json is damaged"):
        store.restore(damaged, run.state)


@pytest.fixture
def mount_below(tmp_path):
    """Mount something in a folder, so that the folder cannot be removed until the mounts are ended."""

    def mount(folder):
        (folder / "mounted").mkdir()
        command = ["mount", "-t", "tmpfs", "tmpfs", str(folder / "mounted")]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"there is no mount: {error}")
        if mounted.returncode:
            pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.strip()}")

    def end():
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if line.split()[1].startswith(f"{tmp_path}/"):
                subprocess.run(["umount", line.split()[1]], check=True)

    mount.end = end
    yield mount
    end()


def test_a_replaced_checkpoint_that_cannot_be_removed_does_not_fail_a_good_save(
    tiny_run, checkpointer, save_at, mount_below, caplog
):
    run, store = tiny_run(), checkpointer()
    directory = save_at(store, run, 1, val_loss=1.0)
    mount_below(directory)
    assert save_at(store, run, 1, val_loss=2.0) == directory
    old = store.root / ".epoch_0_step_1.old"
    assert f"the replaced checkpoint {old} could not be removed" in caplog.text
    assert json.loads((directory / "losses.json").read_text()) == {"val_loss": 2.0}
    mount_below.end()
    store.open()
    store.close()
    assert not old.exists()


def test_restore_from_decides_what_is_resumed(tiny_run, checkpointer, save_at, tmp_path):
    run = tiny_run()
    low = save_at(checkpointer(), run, 1, val_loss=1.0)
    last = save_at(checkpointer(), run, 2, val_loss=2.0)
    wanted = {"LATEST": last, "LOWEST_VAL": low, "epoch_0_step_1": low, str(low): low, None: last}
    for restore_from, expected in wanted.items():
        assert checkpointer(restore_from=restore_from).find_resumable(run.model) == expected
    elsewhere = checkpointer(root=tmp_path / "another", restore_from=str(low))
    assert elsewhere.find_resumable(run.model) == low
    with pytest.raises(FileNotFoundError, match="complete ones there: epoch_0_step_1, epoch_0_step_2"):
        checkpointer(restore_from="epoch_0_step_3").find_resumable(run.model)
    (last / ".incomplete").touch()
    with pytest.raises(RuntimeError, match="incomplete"):
        checkpointer(restore_from="epoch_0_step_2").find_resumable(run.model)
    assert checkpointer(restore_from="LATEST").find_resumable(run.model) == low


def lowest(store):
    return str((store.root / "LOWEST_VAL").readlink())


def test_lowest_val_follows_the_metric(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer()
    save_at(store, run, 0)
    assert not (store.root / "LOWEST_VAL").is_symlink()
    for step, value, expected in [
        (1, float("nan"), None),
        (2, 3.0, 2),
        (3, 3.5, 2),
        (4, float("nan"), 2),
        (5, float("-inf"), 2),
        (6, 2.0, 6),
        (7, 2.0, 6),
    ]:
        save_at(store, run, step, val_loss=value)
        assert expected is None or lowest(store) == f"epoch_0_step_{expected}"


def test_lowest_val_follows_the_metric_that_the_recipe_names(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer(best_metric_key="accuracy_loss")
    save_at(store, run, 1, val_loss=1.0, accuracy_loss=5.0)
    save_at(store, run, 2, val_loss=2.0, accuracy_loss=4.0)
    assert lowest(store) == "epoch_0_step_2"


def test_lowest_val_moves_on_when_its_target_was_left_incomplete(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer()
    save_at(store, run, 1, val_loss=3.0)
    best = save_at(store, run, 4, val_loss=1.0)
    (best / ".incomplete").touch()
    (best / "losses.json").unlink()
    save_at(store, run, 2, val_loss=2.0)
    assert lowest(store) == "epoch_0_step_2"


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"val_loss": null}', None])
def test_unreadable_losses_of_the_lowest_count_as_unknown(tiny_run, checkpointer, save_at, caplog, text):
    run, store = tiny_run(), checkpointer()
    file = save_at(store, run, 1, val_loss=1.0) / "losses.json"
    file.unlink() if text is None else file.write_text(text)
    assert save_at(store, run, 2, val_loss=2.0) == find_latest_checkpoint(store.root)
    assert lowest(store) == "epoch_0_step_2"
    assert f"{file} cannot be read" in caplog.text


def test_late_losses_are_added_and_move_lowest_val(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer()
    save_at(store, run, 1, val_loss=2.0)
    last = save_at(store, run, 2, train_loss=5.0)
    others = {
        file: file.stat().st_mtime_ns for file in last.rglob("*") if file.is_file() and file.name != "losses.json"
    }
    store.update_losses(last, {"val_loss": 3.0})
    assert lowest(store) == "epoch_0_step_1"
    store.update_losses(store.root / "LATEST", {"val_loss": 1.0})
    assert lowest(store) == "epoch_0_step_2"
    assert json.loads((last / "losses.json").read_text()) == {"train_loss": 5.0, "val_loss": 1.0}
    left = {file: file.stat().st_mtime_ns for file in last.rglob("*") if file.is_file() and file.name != "losses.json"}
    assert left == others, "the checkpoint itself is untouched"


def test_late_losses_that_cannot_be_written_leave_the_old_ones(tiny_run, checkpointer, save_at):
    run, store = tiny_run(), checkpointer()
    last = save_at(store, run, 2, train_loss=5.0)
    with (
        files_no_larger_than(10),
        pytest.raises(CheckpointSaveError, match=r"losses\.json could not be updated: .*large"),
    ):
        store.update_losses(last, {"val_loss": 3.0})
    assert json.loads((last / "losses.json").read_text()) == {"train_loss": 5.0}
    assert sorted(path.name for path in last.iterdir() if path.name.startswith(".")) == []


def test_a_folder_holds_its_own_checkpoints_only(tiny_run, tiny_model, checkpointer, save_at, tmp_path, monkeypatch):
    store = checkpointer()
    mine = save_at(store, tiny_run(), 1)
    elsewhere = save_at(checkpointer(root=tmp_path / "elsewhere"), tiny_run(), 1)
    monkeypatch.chdir(tmp_path)
    assert store.holds(mine)
    assert store.holds(mine.relative_to(tmp_path))
    assert store.holds(store.root / "LATEST")
    assert not store.holds(elsewhere)
    copy = mine.rename(mine.with_name("epoch_0_step_1.other-1"))
    assert not store.holds(copy)


@contextmanager
def files_no_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [4_000, 60_000])
def test_a_failed_write_names_the_checkpoint_and_the_last_good_one(tiny_run, tiny_model, checkpointer, save_at, size):
    run, store = tiny_run(tiny_model(100)), checkpointer()
    good = save_at(store, run, 1)
    run.train(1)
    with files_no_larger_than(size), pytest.raises(CheckpointSaveError) as error:
        save_at(store, run, 2)
    assert str(store.root / "epoch_0_step_2") in str(error.value)
    assert f"last good checkpoint is {good}" in str(error.value)
    assert find_latest_checkpoint(store.root) == good
    store.restore(good, tiny_run(tiny_model(100)).state)
    assert save_at(store, run, 2) == find_latest_checkpoint(store.root)


@pytest.mark.parametrize("size", [4_000, 60_000])
def test_a_failed_save_over_the_only_checkpoint_leaves_it(tiny_run, tiny_model, checkpointer, save_at, size):
    run, store = tiny_run(tiny_model(100)), checkpointer()
    good = save_at(store, run, 1, val_loss=1.0)
    saved = everything(run)
    run.train(1)
    with files_no_larger_than(size), pytest.raises(CheckpointSaveError, match=f"last good checkpoint is {good}"):
        save_at(store, run, 1, val_loss=2.0)
    assert find_latest_checkpoint(store.root) == good
    again = tiny_run(tiny_model(100))
    store.restore(good, again.state)
    assert_same(everything(again)["model"], saved["model"])
    assert save_at(store, run, 1, val_loss=2.0) == good
    assert json.loads((good / "losses.json").read_text()) == {"val_loss": 2.0}
    assert lowest(store) == "epoch_0_step_1"
    assert sorted(path.name for path in store.root.iterdir()) == ["LATEST", "LOWEST_VAL", "epoch_0_step_1"]


def test_a_first_save_that_fails_has_no_good_one_to_name(tiny_run, checkpointer, tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointSaveError, match="the last good checkpoint is none"):
        checkpointer().save(tiny_run().state, losses={}, final=False)


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 640 KiB."""
    with mounted_tmpfs(tmp_path / "disk", size="640k") as folder:
        yield folder


def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk, tiny_run, tiny_model, checkpointer, save_at):
    run, store = tiny_run(tiny_model(100)), checkpointer(root=small_disk / "checkpoints")
    run.train(1)
    good = save_at(store, run, 1)
    filler = small_disk / "filler"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    # Full at the first byte, in the model's shards, in the optimizer's state, and in the small files at the end.
    for step, left in enumerate((0, 20_000, 100_000, 130_000, 160_000), start=2):
        filler.write_bytes(bytes(max(free - left, 0)))
        with pytest.raises(CheckpointSaveError, match=f"epoch_0_step_{step} .*last good checkpoint is {good}") as error:
            save_at(store, run, step)
        assert error.value.__cause__ is not None
        filler.unlink()
        assert find_latest_checkpoint(store.root) == good
        store.restore(good, tiny_run(tiny_model(100)).state)
