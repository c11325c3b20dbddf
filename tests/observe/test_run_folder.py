"""Run folders: never shared, never mixed up, free again when their process is gone."""

import signal
import subprocess
import sys

import pytest

from automodel.caches.folder_lock import FolderBusyError
from automodel.observe.run_folder import RunFolder

HOLD = """
import sys
from pathlib import Path
from automodel.observe.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
MAKE = """
import sys
from pathlib import Path
from automodel.observe.run_folder import RunFolder
sys.stdin.readline()
folders = [RunFolder.make_new(Path(sys.argv[1]), "run") for _ in range(20)]
print(*[folder.path.name for folder in folders], flush=True)
sys.stdin.read()
"""


def start(script, path):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_new_folders_of_one_second_have_names_of_their_own(tmp_path):
    folders = [RunFolder.make_new(tmp_path / "runs", "tiny") for _ in range(5)]
    assert len({folder.path for folder in folders}) == 5
    assert all(folder.path.name.startswith("tiny_") and not folder.is_continued for folder in folders)
    for folder in folders:
        folder.close()


def test_processes_that_start_at_once_get_folders_of_their_own(tmp_path):
    processes = [start(MAKE, tmp_path) for _ in range(2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [name for process in processes for name in process.stdout.readline().split()]
    for process in processes:
        process.communicate()
    assert len(names) == len(set(names)) == 40


def test_a_folder_with_a_configuration_is_continued(tmp_path):
    with RunFolder(tmp_path / "a" / "run") as folder:
        assert not folder.is_continued
        folder.write_config("rng:\n  seed: 1\n")
        text = folder.config_file.read_text()
    assert text.startswith("# automodel run configuration, version 1")
    assert text.endswith("rng:\n  seed: 1\n")
    with RunFolder(tmp_path / "a" / "run") as again:
        assert again.is_continued


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    process = start(HOLD, tmp_path / "run")
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FolderBusyError, match=f"another process is working in {tmp_path / 'run'}"):
        RunFolder(tmp_path / "run")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    RunFolder(tmp_path / "run").close()


def test_a_folder_is_free_again_once_closed(tmp_path):
    first = RunFolder(tmp_path / "run")
    with pytest.raises(FolderBusyError):
        RunFolder(tmp_path / "run")
    first.close()
    RunFolder(tmp_path / "run").close()


def test_a_new_folder_that_stayed_empty_is_removed_again(tmp_path):
    RunFolder.make_new(tmp_path / "runs", "tiny").close()
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "mine").mkdir()
    RunFolder(tmp_path / "mine").close()
    assert (tmp_path / "mine").is_dir()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        RunFolder(tmp_path / "file")


def test_where_the_files_are(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        files = (folder.training_file, folder.validation_file, folder.report_file, folder.checkpoints)
        names = [file.relative_to(folder.path).name for file in files]
    assert names == ["training.jsonl", "validation.jsonl", "report.html", "checkpoints"]


def test_ranks_join_the_folder_that_rank_zero_has_locked(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        with RunFolder.join(folder.path) as joined:
            assert joined.path == folder.path
            assert joined.rank_log(3) == tmp_path / "run" / "logs" / "rank_3.log"
        with pytest.raises(FolderBusyError):
            RunFolder(tmp_path / "run")


def test_a_folder_that_this_machine_does_not_see_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the run folder .*/run, which rank 0 made, is not there on "):
        RunFolder.join(tmp_path / "run")
    assert not (tmp_path / "run").exists()
