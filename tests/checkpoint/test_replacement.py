"""Saves over complete checkpoints: whatever state a kill leaves, the next job finds one whole checkpoint."""

import pytest

from automodel.checkpoint.directories import MANIFEST, find_complete_checkpoints, mark_checkpoint_incomplete
from automodel.checkpoint.replacement import drop_replaced, put_in_place, replacement_of, settle_replacements

NAME = "epoch_0_step_3"


def make(root, name, content):
    directory = root / name
    directory.mkdir()
    (directory / MANIFEST).write_text(content)
    return directory


def contents(root):
    return {path.name: (path / MANIFEST).read_text() for path in root.iterdir()}


def test_a_replacement_takes_the_place_of_the_old_one(tmp_path):
    checkpoint = make(tmp_path, NAME, "old")
    assert make(tmp_path, f".{NAME}.new", "new") == replacement_of(checkpoint)
    assert find_complete_checkpoints(tmp_path) == [checkpoint]
    put_in_place(checkpoint)
    assert contents(tmp_path) == {NAME: "new", f".{NAME}.old": "old"}
    drop_replaced(checkpoint)
    drop_replaced(checkpoint)
    assert contents(tmp_path) == {NAME: "new"}


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ({NAME: "old", f".{NAME}.new": "half"}, "old"),
        ({NAME: "old", f".{NAME}.new": "new"}, "new"),
        ({f".{NAME}.old": "old", f".{NAME}.new": "new"}, "new"),
        ({NAME: "new", f".{NAME}.old": "old"}, "new"),
        ({NAME: "new", f".{NAME}.old": "old", f".{NAME}.new": "half"}, "new"),
        ({NAME: "old", f".{NAME}.old": "older", f".{NAME}.new": "new"}, "new"),
        ({f".{NAME}.old": "old"}, "old"),
        ({f".{NAME}.new": "half"}, None),
    ],
)
def test_every_state_that_a_kill_can_leave_is_settled(tmp_path, left, kept):
    for name, content in left.items():
        directory = make(tmp_path, name, content)
        if content == "half":
            mark_checkpoint_incomplete(directory)
    other = make(tmp_path, "epoch_0_step_30", "other")
    for _ in range(2):
        settle_replacements(tmp_path)
        assert contents(tmp_path) == {other.name: "other"} | ({} if kept is None else {NAME: kept})


def test_other_names_are_left_alone(tmp_path):
    names = [f"{NAME}.old", f"{NAME}.new", f"{NAME}.other-1", ".backup.old", f".{NAME}.older", ".step_3.new"]
    for name in names:
        make(tmp_path, name, name)
    settle_replacements(tmp_path)
    assert contents(tmp_path) == {name: name for name in names}


def test_a_folder_that_is_not_there_has_nothing_to_settle(tmp_path):
    settle_replacements(tmp_path / "nowhere")
