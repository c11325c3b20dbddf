"""Replacing a file in one step."""

import os

import pytest

from automodel.observe.atomic_file import replace_file


def test_new_files_get_the_mode_of_the_process_and_old_ones_keep_theirs(tmp_path):
    path = tmp_path / "new" / "file"
    mask = os.umask(0o027)
    try:
        replace_file(path, b"one")
    finally:
        os.umask(mask)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o640)
    path.chmod(0o604)
    replace_file(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o604)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_failure_leaves_no_temporary_file(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").touch()
    with pytest.raises(OSError, match="folder"):
        replace_file(target, b"content")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
