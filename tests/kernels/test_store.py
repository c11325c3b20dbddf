import json
from dataclasses import fields, replace

import pytest

from automodel_kernels.tuning.store import FolderStore, Scope, Trial
from small_disks import mounted_tmpfs

SCOPE = Scope(
    kernel="package.module:some_kernel",
    key='{"x_ptr": "bfloat16"}',
    device="Toy GPU",
    sm_count=132,
    shared_memory=232_448,
    triton="3.7.1",
    space="0123",
    source="4567",
    bit_exact=False,
)
FAST, SLOW = Trial(config="BLOCK=64", milliseconds=0.25), Trial(config="BLOCK=128", milliseconds=0.5)
FAILED = Trial(config="BLOCK=4096", reason="CompilationError: too large")


def test_what_was_recorded_is_found_by_another_store_on_the_same_folder(tmp_path):
    store = FolderStore(tmp_path / "new" / "folder")
    assert store.find_winner(SCOPE) is None
    assert store.find_trials(SCOPE) == {}
    assert not (tmp_path / "new").exists(), "looking makes no folder"
    for trial in (FAST, FAILED, SLOW):
        store.record_trial(SCOPE, trial)
    other = FolderStore(tmp_path / "new" / "folder")
    assert other.find_trials(SCOPE) == {each.config: each for each in (FAST, FAILED, SLOW)}
    assert other.find_winner(SCOPE) is None
    store.record_winner(SCOPE, "BLOCK=64")
    assert other.find_winner(SCOPE) == "BLOCK=64"


@pytest.mark.parametrize("name", [field.name for field in fields(Scope)])
def test_nothing_holds_in_another_scope(tmp_path, name):
    store = FolderStore(tmp_path)
    store.record_trial(SCOPE, FAST)
    store.record_winner(SCOPE, FAST.config)
    value = getattr(SCOPE, name)
    changed = not value if isinstance(value, bool) else value * 2
    other = replace(SCOPE, **{name: changed})
    assert store.find_trials(other) == {}
    assert store.find_winner(other) is None


def test_the_first_winner_and_the_first_time_hold(tmp_path):
    store = FolderStore(tmp_path)
    store.record_trial(SCOPE, FAST)
    store.record_trial(SCOPE, replace(FAST, milliseconds=9.0))
    store.record_winner(SCOPE, "BLOCK=64")
    store.record_winner(SCOPE, "BLOCK=128")
    assert store.find_trials(SCOPE) == {"BLOCK=64": FAST}
    assert store.find_winner(SCOPE) == "BLOCK=64"


def test_a_torn_line_is_passed_over_and_does_not_spoil_the_next(tmp_path):
    store = FolderStore(tmp_path)
    store.record_trial(SCOPE, FAST)
    store.record_trial(SCOPE, SLOW)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        assert all(trial in (FAST, SLOW) for trial in store.find_trials(SCOPE).values())
        store.record_trial(SCOPE, FAILED)
        assert store.find_trials(SCOPE)[FAILED.config] == FAILED
    path.write_bytes(b"\xff\x00\n[1, 2]\n{}\n" + whole)
    assert set(store.find_trials(SCOPE)) == {FAST.config, SLOW.config}


@pytest.mark.parametrize("line", ['{"config": 5, "milliseconds": "fast"}', '{"config": "a", "milliseconds": [1]}'])
def test_a_line_with_other_types_is_passed_over(tmp_path, line):
    store = FolderStore(tmp_path)
    store.record_trial(SCOPE, FAST)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + line + '\n{"winner": 7}\n')
    assert store.find_trials(SCOPE) == {FAST.config: FAST}
    assert store.find_winner(SCOPE) is None


def test_the_file_says_what_it_is_about(tmp_path):
    FolderStore(tmp_path).record_winner(SCOPE, "BLOCK=64")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("some_kernel-")
    header, winner = (json.loads(line) for line in path.read_text().split("\n") if line)
    assert header["scope"]["device"] == "Toy GPU"
    assert winner == {"winner": "BLOCK=64"}


def test_a_full_disk_is_an_error_of_the_operating_system_and_tears_nothing(tmp_path):
    with mounted_tmpfs(tmp_path / "disk", size="64k") as disk:
        store = FolderStore(disk / "store")
        store.record_trial(SCOPE, FAST)
        (disk / "ballast").write_bytes(b"\0" * 40_000)
        with pytest.raises(OSError):  # noqa: PT011 - ENOSPC, or a write that was cut short
            fill(store)
        assert store.find_trials(SCOPE)[FAST.config] == FAST


def fill(store):
    for number in range(1000):
        store.record_trial(SCOPE, Trial(config=f"{number}", reason="x" * 200))
