"""`automodel run` as one of several ranks: who says what where, and how ranks end together."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import scripted_recipe
from forked_command import ForkedCommand, free_port

SPOILT_OUTPUT = f"{Path(__file__).with_name('spoilt_output_recipe.py')}:SpoiltOutputRecipe"


@pytest.fixture
def write(tmp_path):
    """Writes a recipe in which each rank does what `script` says."""

    def write(script, target=f"{scripted_recipe.__file__}:ScriptedRecipe", **dist_env):
        values = {
            "recipe": {"_target_": target},
            "script": script,
            "dist_env": {"timeout_minutes": 1, **dist_env},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return ["run", "recipe.yaml", "--run-dir", "run"]

    return write


@pytest.fixture
def port():
    """Where the ranks meet."""
    return free_port()


@pytest.fixture
def start(tmp_path, port):
    """Starts ranks with the variables of torchrun, or of Slurm; they are ended with the test."""
    with ExitStack() as stack:

        def start(words, *, world_size, ranks=None, slurm=False):
            commands = []
            for rank in ranks or range(world_size):
                if slurm:
                    environment = {
                        "SLURM_PROCID": rank,
                        "SLURM_LOCALID": rank,
                        "SLURM_STEP_NUM_TASKS": world_size,
                        "SLURM_STEP_TASKS_PER_NODE": f"{world_size}(x1)",
                        "SLURM_STEP_NODELIST": "localhost",
                        "SLURM_JOB_ID": 4 + port,
                        "MASTER_PORT": port,
                    }
                else:
                    environment = {
                        "RANK": rank,
                        "LOCAL_RANK": rank,
                        "WORLD_SIZE": world_size,
                        "LOCAL_WORLD_SIZE": world_size,
                        "MASTER_ADDR": "localhost",
                        "MASTER_PORT": port,
                    }
                settings = {name: str(value) for name, value in environment.items()}
                commands.append(stack.enter_context(ForkedCommand(words, folder=tmp_path, environment=settings)))
            return commands

        yield start


def errors(commands):
    """The lines of errors on the terminal, from all ranks."""
    return [line for command in commands for line in command.stderr.splitlines() if line.startswith("error:")]


def log(folder, rank=1):
    return (folder / "run" / "logs" / f"rank_{rank}.log").read_text()


@pytest.mark.parametrize("slurm", [False, True], ids=["torchrun", "slurm"])
def test_rank_zero_speaks_and_the_others_write_files(slurm, start, write, tmp_path):
    commands = start(write({}), world_size=3, slurm=slurm)
    assert [command.wait() for command in commands] == [0, 0, 0]
    assert commands[0].stdout.splitlines() == [
        "run folder: run",
        "said by rank 0",
        "finished: 3 steps run, train_loss 0.5000",
        "report: report.html",
    ]
    assert [command.stdout + command.stderr for command in commands[1:]] == ["", ""]
    for rank in (1, 2):
        header, *lines = log(tmp_path, rank).splitlines()
        assert header.startswith("--- 20")
        assert f" rank {rank} of 3, process " in header
        assert lines == [f"INFO scripted: rank {rank} is set up", f"said by rank {rank}", f"written by rank {rank}"]


def test_logs_grow_when_a_run_is_continued(start, write, tmp_path):
    for times in (1, 2):
        commands = start(write({}), world_size=2)
        assert [command.wait() for command in commands] == [0, 0]
        assert log(tmp_path).count("--- ") == log(tmp_path).count("said by rank 1") == times


@pytest.mark.parametrize(("failing", "other"), [(0, "stuck"), (1, "hang"), (1, "compute")])
def test_a_failing_rank_ends_the_others_and_is_the_only_one_to_tell(failing, other, start, write, tmp_path):
    commands = start(write({failing: "fail", 1 - failing: other}), world_size=2)
    assert [command.wait() for command in commands] == [1, 1]
    assert errors(commands) == [f"error: [rank {failing}] no such key"]
    assert f"rank {failing} failed: KeyError: 'no such key'" in log(tmp_path, 1 - failing)
    assert "Traceback" not in commands[1 - failing].stderr
    # A rank that waits for the failed one ends by itself, so that it can clean up.
    assert (tmp_path / "run" / f"unwound_{1 - failing}").exists() == (other == "hang")
    if failing == 1:
        assert f"(the traceback is in {tmp_path}/run/logs/rank_1.log)" in commands[1].stderr
        assert "in fail\n" in log(tmp_path)
    else:
        assert "in fail\n" in commands[0].stderr


def test_an_error_that_ranks_share_is_told_by_the_rank_where_it_began(start, write):
    commands = start(write({0: "join together", 1: "join together", 2: "fail together"}), world_size=3)
    assert [command.wait() for command in commands] == [1, 1, 1]
    assert errors(commands) == ["error: [rank 2] the disk is full"]


def test_an_error_of_all_ranks_is_no_ranks_own(start, write):
    commands = start(write(dict.fromkeys((0, 1), "fail to save"), SPOILT_OUTPUT), world_size=2)
    assert [command.wait() for command in commands] == [1, 1]
    assert errors(commands) == ["error: the checkpoint could not be written: rank 0 failed: OSError: no space"]


def test_a_rank_whose_log_is_full_says_its_line_only(start, write, tmp_path):
    commands = start(write({0: "compute", 1: "fail with a full log"}, SPOILT_OUTPUT), world_size=2)
    assert [command.wait() for command in commands] == [1, 1]
    assert commands[1].stderr.splitlines() == [
        "error: [rank 1] no such key",
        f"  (the traceback is in {tmp_path}/run/logs/rank_1.log)",
        "  (the log of rank 1 cannot be written: [Errno 27] File too large)",
    ]
    assert "lost" not in log(tmp_path)


def test_a_full_log_fails_no_run(start, write, tmp_path):
    commands = start(write({1: "train with a full log"}, SPOILT_OUTPUT), world_size=2)
    assert [command.wait() for command in commands] == [0, 0]
    assert commands[1].stdout + commands[1].stderr == ""


def test_a_log_that_cannot_be_opened_fails_no_run(start, write, tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank_1.log").symlink_to("/dev/full")
    commands = start(write({}), world_size=2)
    assert [command.wait() for command in commands] == [0, 0]
    assert commands[1].stderr == ("WARNING: the log of rank 1 cannot be written: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_that_cannot_be_written_do_not_change_the_status(world_size, start, write):
    for action, status in (("train with full streams", 0), ("fail with full streams", 1)):
        commands = start(write(dict.fromkeys((0, 1), action), SPOILT_OUTPUT), world_size=world_size)
        assert [command.wait() for command in commands] == [status] * world_size


@pytest.mark.parametrize("action", ["refuse", "refuse in setup"])
def test_the_same_mistake_on_all_ranks_is_told_once(action, start, write):
    commands = start(write(dict.fromkeys(range(3), action)), world_size=3)
    statuses = [command.wait() for command in commands]
    assert sorted(statuses) == [1, 1, 2]
    told = statuses.index(2)
    assert errors(commands) == [f"error: [rank {told}] script must be sensible, got {action}"]


def test_a_recipe_that_cannot_be_read_is_told_once_and_leaves_nothing(start, tmp_path):
    commands = start(["run", "recipe.yaml", "--run-dir", "run"], world_size=2)
    assert sorted(command.wait() for command in commands) == [1, 2]
    (message,) = errors(commands)
    assert message.endswith("there is no recipe file 'recipe.yaml'")
    assert not (tmp_path / "run").exists()


def test_a_rank_that_leaves_without_an_exception_is_told_of(start, write):
    commands = start(write({0: "compute", 1: "leave"}), world_size=2)
    assert [command.wait() for command in commands] == [1, 3]


@pytest.mark.parametrize(("present", "named"), [([0, 1], "rank 2"), ([1, 2], "localhost:")])
def test_missing_ranks_are_named(present, named, start, write):
    commands = start(write({}, timeout_minutes=0.03), world_size=3, ranks=present)
    assert 2 in [command.wait() for command in commands]
    messages = errors(commands)
    assert named in messages[0]
    assert "within 0.03 minutes (dist_env.timeout_minutes)" in messages[0]
    # Without a store there is no way to agree who tells.
    assert len(messages) == (1 if 0 in present else 2)


def test_a_rank_that_does_not_come_as_far_is_named(start, write, port):
    commands = start(write({0: "absent"}, timeout_minutes=0.03), world_size=2)
    assert commands[1].wait() == 2
    (message,) = errors(commands[1:])
    missing, _, place = message.partition("; ")
    assert missing == "error: [rank 1] 1 of 2 ranks did not join within 0.03 minutes (dist_env.timeout_minutes): rank 0"
    assert place == f"they meet at localhost:{port} (MASTER_ADDR, MASTER_PORT)"
    assert commands[0].wait() == 1


def test_ranks_end_when_the_keeper_of_their_store_is_killed(start, write):
    commands = start(write({0: "die", 1: "stuck", 2: "compute"}), world_size=3)
    assert [command.wait() for command in commands] == [-signal.SIGKILL, 1, 1]
    assert errors(commands) == [
        "error: [rank 1] the job failed: the process that keeps the store of the ranks has ended"
    ]


@pytest.mark.parametrize("words", [["--nproc-per-node", "3"], ["--nproc-per-node", "0"]], ids=" ".join)
def test_a_number_of_processes_that_the_launcher_contradicts(words, start, write):
    commands = start([*write({}), *words], world_size=2)
    assert [command.wait() for command in commands] == [2, 2]
    expected = "must be positive, got 0" if words[1] == "0" else "3 is not what torchrun has started"
    assert expected in commands[0].stderr
    assert commands[1].stderr == ""


@pytest.mark.parametrize("words", [["run"], ["run", "hybrid_tiny", "--nproc-per-node", "two"]], ids=" ".join)
def test_words_that_cannot_be_parsed_are_told_once(words, start):
    commands = start(words, world_size=2)
    assert [command.wait() for command in commands] == [2, 2]
    assert commands[0].stderr.startswith("automodel run: error: ")
    assert commands[1].stderr == ""


def test_the_number_of_processes_that_the_launcher_started(start, write):
    commands = start([*write({}), "--nproc-per-node", "2"], world_size=2)
    assert [command.wait() for command in commands] == [0, 0]


def test_a_dry_run_is_rank_zeros(start):
    commands = start(["run", "nowhere.yaml", "--dry-run"], world_size=2)
    assert [command.wait() for command in commands] == [2, 0]
    assert commands[0].stderr == "error: there is no recipe file 'nowhere.yaml'\n"
    assert commands[1].stdout + commands[1].stderr == ""
