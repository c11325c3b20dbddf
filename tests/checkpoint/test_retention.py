"""prune_checkpoints: the newest stay, and so does whatever a pointer names or another run owns."""

import pytest

from automodel.checkpoint.directories import LATEST, LOWEST_VAL, MANIFEST, mark_checkpoint_incomplete, point_to
from automodel.checkpoint.retention import prune_checkpoints


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 3, 10, 20):
        directory = tmp_path / f"epoch_0_step_{step}"
        (directory / "model").mkdir(parents=True)
        (directory / MANIFEST).write_text("{}")
    return tmp_path


def steps(root):
    return sorted(int(path.name.rpartition("_")[2]) for path in root.glob("epoch_*") if path.is_dir())


@pytest.mark.parametrize(("keep", "left"), [(1, [20]), (2, [10, 20]), (5, [1, 2, 3, 10, 20]), (9, [1, 2, 3, 10, 20])])
def test_the_newest_stay(root, keep, left):
    before = steps(root)
    removed = prune_checkpoints(root, keep=keep)
    assert steps(root) == left
    assert [path.name for path in removed] == [f"epoch_0_step_{step}" for step in before if step not in left]


def test_targets_of_pointers_stay(root):
    point_to(root / "epoch_0_step_2", LOWEST_VAL)
    point_to(root / "epoch_0_step_10", LATEST)
    prune_checkpoints(root, keep=1)
    assert steps(root) == [2, 10, 20]
    assert (root / "epoch_0_step_2" / "model").is_dir()


def test_targets_of_text_pointers_stay(root):
    (root / "LOWEST_VAL.txt").write_text("epoch_0_step_3\n")
    prune_checkpoints(root, keep=1)
    assert steps(root) == [3, 20]


def test_older_remains_of_interrupted_saves_go_and_do_not_count(root):
    mark_checkpoint_incomplete(root / "epoch_0_step_3")
    mark_checkpoint_incomplete(root / "epoch_0_step_20")
    prune_checkpoints(root, keep=2)
    assert steps(root) == [2, 10, 20], "a save that is newer may be running"


def test_checkpoints_of_others_neither_count_nor_go(root):
    theirs = {"epoch_0_step_1", "epoch_0_step_20"}
    removed = prune_checkpoints(root, keep=1, is_ours=lambda path: path.name not in theirs)
    assert steps(root) == [1, 10, 20]
    assert [path.name for path in removed] == ["epoch_0_step_2", "epoch_0_step_3"]


def test_nothing_but_canonical_directories_goes(root):
    names = ("epoch_0_step_1.other-1", "step_1", "notes")
    for name in names:
        (root / name).mkdir()
    prune_checkpoints(root, keep=1)
    assert all((root / name).is_dir() for name in names)


def test_an_empty_folder_has_nothing_to_remove(tmp_path):
    assert prune_checkpoints(tmp_path / "nowhere", keep=1) == []
    (tmp_path / "epoch_0_step_1").mkdir()
    assert prune_checkpoints(tmp_path, keep=1) == []
    assert steps(tmp_path) == [1]
