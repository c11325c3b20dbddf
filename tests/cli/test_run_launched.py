"""`automodel run --nproc-per-node N` and torchrun, as they are typed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import scripted_recipe
from forked_command import ForkedCommand, clean_environment, wait_until


@pytest.fixture
def write(tmp_path):
    """Writes a recipe in which each rank does what `script` says."""

    def write(script):
        values = {"recipe": {"_target_": f"{scripted_recipe.__file__}:ScriptedRecipe"}, "script": script}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return ["run", "recipe.yaml", "--run-dir", "run"]

    return write


def has_ended(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    # A process whose parent is gone stays until it is reaped.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(folder, name):
    """Waits until both ranks have left a file."""
    wait_until(lambda: all((folder / "run" / f"{name}_{rank}").exists() for rank in (0, 1)))


def start(words, *before, folder, **environment):
    """Starts the command as a process of its own."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "automodel", *words],
        cwd=folder,
        env={**clean_environment(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_stop_signals_reach_the_ranks_who_save_and_end(write, tmp_path):
    words = [*write(dict.fromkeys((0, 1), "stop on interrupt")), "--nproc-per-node", "2"]
    with ForkedCommand(words, folder=tmp_path) as command:
        wait_for(tmp_path, "ready")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            command.send(number)
            wait_for(tmp_path, number.name)
        command.send(signal.SIGINT)
        assert command.wait() == 0
    wait_for(tmp_path, "saved")
    assert command.stdout.splitlines() == [
        "run folder: run",
        "said by rank 0",
        "finished: 3 steps run, train_loss 0.5000",
        "report: report.html",
    ]
    assert command.stderr.splitlines() == [
        "INFO scripted: rank 0 is set up",
        "written by rank 0",
        "",
        "SIGTERM: saving, then stopping",
    ]


def test_a_killed_rank_is_told_of_and_ends_the_others(write, tmp_path):
    with ForkedCommand([*write({0: "hang", 1: "die"}), "--nproc-per-node", "2"], folder=tmp_path) as command:
        assert command.wait() == 1
    errors = command.stderr.splitlines()[2:]
    assert errors == ["error: [rank 1] was ended by SIGKILL (was there enough memory?)"]
    assert has_ended((tmp_path / "run" / "pid_0").read_text())


def test_ranks_do_not_outlive_the_process_that_started_them(write, tmp_path):
    words = [*write(dict.fromkeys((0, 1), "stop on interrupt")), "--nproc-per-node", "2"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # A process of its own, since a forked one knows its folder for temporary files already.
    with start(words, folder=tmp_path, TMPDIR=str(temporary)) as command:
        wait_for(tmp_path, "ready")
        command.kill()
        errors = command.stderr.read()
    for rank in (0, 1):
        pid = (tmp_path / "run" / f"pid_{rank}").read_text()
        wait_until(lambda pid=pid: has_ended(pid))
    assert errors.splitlines()[2:] == [
        "error: [rank 0] the job failed: the process that keeps the store of the ranks has ended"
    ]
    assert list(temporary.iterdir()) == []


def test_under_nohup_a_hangup_is_ignored(write, tmp_path):
    words = [*write(dict.fromkeys((0, 1), "stop on interrupt")), "--nproc-per-node", "2"]
    with start(words, "nohup", folder=tmp_path) as command:
        wait_for(tmp_path, "ready")
        command.send_signal(signal.SIGHUP)
        # Signals are passed on in their order.
        command.send_signal(signal.SIGUSR1)
        wait_for(tmp_path, "SIGUSR1")
        command.send_signal(signal.SIGINT)
        errors = command.stderr.read()
        assert command.wait(timeout=60) == 0, errors
    assert not list((tmp_path / "run").glob("SIGHUP_*"))


SLOW_IMPORT = """
import os, signal, sys
from pathlib import Path

class Pause:
    def find_spec(self, name, path, target=None):
        if name == "torch._meta_registrations":
            Path("run", "importing_" + os.environ["RANK"]).touch()
            signal.pause()

if "RANK" in os.environ:
    sys.meta_path.insert(0, Pause())
"""


def test_ctrl_c_while_the_ranks_import_torch(write, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SLOW_IMPORT)
    words = [*write({}), "--nproc-per-node", "2"]
    with ForkedCommand(words, folder=tmp_path, environment={"PYTHONPATH": str(tmp_path / "path")}) as command:
        wait_for(tmp_path, "importing")
        command.send(signal.SIGINT)
        assert command.wait() == 130
    assert command.stdout + command.stderr == "error: interrupted\n"


def test_mistakes_have_their_status(write, tmp_path):
    words = [*write(dict.fromkeys((0, 1), "refuse")), "--nproc-per-node", "2"]
    with ForkedCommand(words, folder=tmp_path) as command:
        assert command.wait() == 2
    (message,) = command.stderr.splitlines()
    assert message in [f"error: [rank {rank}] script must be sensible, got refuse" for rank in (0, 1)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "there is no recipe file 'nowhere.yaml'"),
        (["hybrid_tiny", "--dryrun"], "unknown option --dryrun"),
        (["hybrid_tiny", "stray"], "unexpected argument 'stray'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misspelt_words_start_no_process(words, message, tmp_path):
    with ForkedCommand(["run", *words, "--nproc-per-node", "2"], folder=tmp_path) as command:
        assert command.wait() == 2
    assert command.stderr.startswith("error: ")
    assert "[rank" not in command.stderr
    assert message in command.stderr


def test_a_plan_for_several_ranks_starts_none(tmp_path):
    words = ["run", "hybrid_tiny", "--dry-run", "--step_scheduler.local_batch_size", "1"]
    with ForkedCommand([*words, "--nproc-per-node", "4"], folder=tmp_path) as command:
        assert command.wait() == 0
    with ForkedCommand(words, folder=tmp_path) as alone:
        assert alone.wait() == 0
    assert command.stdout != alone.stdout


def test_torchrun(write, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "automodel"]
    done = subprocess.run(
        [*command, *write({0: "compute", 1: "fail"})],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("error:")]
    assert lines[place] == "error: [rank 1] no such key"
    # What torchrun says of the end comes after it.
    assert not any("Traceback" in line or "closing signal" in line for line in lines[:place])
