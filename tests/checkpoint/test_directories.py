"""Names, the in-progress marker, and the pointers LATEST and LOWEST_VAL."""

import subprocess
import sys

import pytest

from automodel.checkpoint.directories import (
    LATEST,
    LOWEST_VAL,
    MANIFEST,
    checkpoint_name,
    clear_checkpoint_incomplete,
    find_complete_checkpoints,
    find_latest_checkpoint,
    is_checkpoint_incomplete,
    list_automodel_checkpoints,
    mark_checkpoint_incomplete,
    point_to,
    read_checkpoint_pointer,
    resolve_restore_from_to_checkpoint_dir,
)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def complete(root, step, *, epoch=0):
    directory = root / checkpoint_name(epoch=epoch, step=step)
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text("{}")
    return directory


def test_only_canonical_directories_are_listed_the_oldest_first(root):
    for name in ("epoch_1_step_10", "epoch_0_step_9", "epoch_0_step_10", "epoch_0_step_100"):
        (root / name).mkdir(parents=True)
    for name in ("epoch_0_step_3.other-1", "step_4", "epoch_0_step_x", "backup_epoch_0_step_5"):
        (root / name).mkdir()
    (root / "epoch_0_step_6").write_text("a file")
    (root / "epoch_0_step_7").symlink_to("epoch_0_step_9")
    names = [path.name for path in list_automodel_checkpoints(root)]
    assert names == ["epoch_0_step_9", "epoch_0_step_10", "epoch_1_step_10", "epoch_0_step_100"]
    assert list_automodel_checkpoints(root / "nowhere") == []


def test_the_marker_decides_whether_a_checkpoint_is_complete(root):
    directory = complete(root, 3)
    assert not is_checkpoint_incomplete(directory)
    mark_checkpoint_incomplete(directory)
    assert (directory / ".incomplete").exists()
    assert is_checkpoint_incomplete(str(directory))
    assert find_complete_checkpoints(root) == []
    clear_checkpoint_incomplete(str(directory))
    clear_checkpoint_incomplete(directory)
    assert not is_checkpoint_incomplete(directory)
    (directory / MANIFEST).unlink()
    assert is_checkpoint_incomplete(directory), "without its manifest a directory is no checkpoint"


def test_the_latest_is_what_the_pointer_names_even_beside_a_higher_step(root):
    assert find_latest_checkpoint(root) is None
    older, newer = complete(root, 3), complete(root, 20)
    assert find_latest_checkpoint(str(root)) == newer
    point_to(older, LATEST)
    assert find_latest_checkpoint(root) == older


@pytest.mark.parametrize("spoil", [mark_checkpoint_incomplete, lambda path: (path / MANIFEST).unlink()])
def test_an_incomplete_target_of_latest_falls_back_to_the_newest_complete_one(root, spoil):
    for step in (1, 2, 3):
        complete(root, step)
    point_to(root / "epoch_0_step_3", LATEST)
    spoil(root / "epoch_0_step_3")
    assert find_latest_checkpoint(root) == root / "epoch_0_step_2"


@pytest.mark.parametrize("target", ["epoch_0_step_9", "", ".", "\n"])
def test_a_pointer_to_nothing_is_none(root, target):
    there = complete(root, 1)
    (root / "LATEST.txt").write_text(target)
    assert read_checkpoint_pointer(root, LATEST) is None
    assert find_latest_checkpoint(root) == there
    (root / LATEST).symlink_to("epoch_0_step_8")
    assert read_checkpoint_pointer(root, LATEST) is None


def test_pointers_are_relative_links_that_survive_a_move_of_the_folder(root, tmp_path):
    point_to(complete(root, 4), LATEST)
    assert str((root / LATEST).readlink()) == "epoch_0_step_4"
    root.rename(tmp_path / "moved")
    assert find_latest_checkpoint(tmp_path / "moved") == tmp_path / "moved" / "epoch_0_step_4"


def test_a_text_file_is_read_where_the_filesystem_has_no_links(root):
    first, second = complete(root, 1), complete(root, 2)
    (root / "LATEST.txt").write_text("epoch_0_step_1\n")
    (root / "LOWEST_VAL.txt").write_text(str(second))
    assert read_checkpoint_pointer(str(root), LATEST) == first
    assert find_latest_checkpoint(root) == first
    assert read_checkpoint_pointer(root, LOWEST_VAL) == second
    assert resolve_restore_from_to_checkpoint_dir(root, LATEST) == first


def test_the_link_that_was_set_last_wins_over_an_older_text_file(root):
    first, second = complete(root, 1), complete(root, 2)
    (root / "LATEST.txt").write_text(first.name)
    point_to(second, LATEST)
    assert find_latest_checkpoint(root) == second


# A seccomp filter or a FAT image would need privileges; an audit hook makes the real system call fail instead.
NO_LINKS = """
import sys
from pathlib import Path
from automodel.checkpoint.directories import point_to
def refuse(event, arguments):
    if event == "os.symlink":
        raise PermissionError(1, "Operation not permitted")
sys.addaudithook(refuse)
point_to(Path(sys.argv[1]), "LATEST")
"""


def test_a_text_file_is_written_where_links_are_refused_and_replaces_an_older_link(root):
    first, second = complete(root, 1), complete(root, 2)
    point_to(first, LATEST)
    subprocess.run([sys.executable, "-c", NO_LINKS, str(second)], check=True)
    assert (root / "LATEST.txt").read_text() == "epoch_0_step_2\n"
    assert find_latest_checkpoint(root) == second
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_restore_from_takes_pointers_names_and_paths(root, tmp_path, monkeypatch):
    low, last, elsewhere = complete(root, 1), complete(root, 2), complete(tmp_path / "elsewhere", 7, epoch=1)
    point_to(low, LOWEST_VAL)
    point_to(last, LATEST)
    assert resolve_restore_from_to_checkpoint_dir(root, "LATEST") == last
    assert resolve_restore_from_to_checkpoint_dir(str(root), "LOWEST_VAL") == low
    assert resolve_restore_from_to_checkpoint_dir(root, "epoch_0_step_1") == low
    assert resolve_restore_from_to_checkpoint_dir(root, str(elsewhere)) == elsewhere
    monkeypatch.chdir(tmp_path)
    assert resolve_restore_from_to_checkpoint_dir(root, "elsewhere/epoch_1_step_7").samefile(elsewhere)


@pytest.mark.parametrize("wanted", ["epoch_0_step_5", "/nowhere/epoch_0_step_1", "LOWEST_VAL"])
def test_a_missing_checkpoint_lists_those_that_are_there(root, wanted):
    complete(root, 1)
    complete(root, 12)
    mark_checkpoint_incomplete(complete(root, 13))
    with pytest.raises(FileNotFoundError) as error:
        resolve_restore_from_to_checkpoint_dir(root, wanted)
    assert f"checkpoint.restore_from: {wanted!r}" in str(error.value)
    assert "epoch_0_step_1, epoch_0_step_12)" in str(error.value)


def test_restoring_from_an_empty_folder_says_that_there_is_none(root):
    with pytest.raises(FileNotFoundError, match="none"):
        resolve_restore_from_to_checkpoint_dir(root, "LATEST")


def test_an_incomplete_checkpoint_that_is_asked_for_is_refused(root):
    complete(root, 1)
    mark_checkpoint_incomplete(complete(root, 2))
    point_to(root / "epoch_0_step_2", LOWEST_VAL)
    for wanted in ("epoch_0_step_2", str(root / "epoch_0_step_2"), "LOWEST_VAL"):
        with pytest.raises(RuntimeError, match="epoch_0_step_2 was left incomplete"):
            resolve_restore_from_to_checkpoint_dir(root, wanted)


def test_a_folder_that_is_no_checkpoint_is_not_called_incomplete(root, tmp_path):
    there = complete(root, 1)
    (there / "model/consolidated").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    wrong = (
        str(tmp_path),
        str(root),
        str(there / "model/consolidated"),
        "epoch_0_step_1/model",
        "",
        str(tmp_path / "empty"),
    )
    for wanted in wrong:
        with pytest.raises(FileNotFoundError) as error:
            resolve_restore_from_to_checkpoint_dir(root, wanted)
        assert f"checkpoint.restore_from: {wanted!r} is no checkpoint of automodel" in str(error.value)
        assert f"(in {root}, complete ones there: epoch_0_step_1)" in str(error.value)


def test_the_folder_of_another_run_lists_the_checkpoints_in_it(root, tmp_path):
    complete(root, 1)
    complete(tmp_path / "other/checkpoints", 7)
    for wanted in (tmp_path / "other", tmp_path / "other/checkpoints"):
        with pytest.raises(FileNotFoundError, match="is no checkpoint of automodel") as error:
            resolve_restore_from_to_checkpoint_dir(root, str(wanted))
        assert f"(in {tmp_path}/other/checkpoints, complete ones there: epoch_0_step_7)" in str(error.value)


def test_a_marked_folder_of_any_name_is_called_incomplete(root, tmp_path):
    copy = complete(root, 1).rename(tmp_path / "copy")
    mark_checkpoint_incomplete(copy)
    (root / "epoch_0_step_2").mkdir()
    for wanted in (str(copy), "epoch_0_step_2"):
        with pytest.raises(RuntimeError, match="was left incomplete by an interrupted save"):
            resolve_restore_from_to_checkpoint_dir(root, wanted)
