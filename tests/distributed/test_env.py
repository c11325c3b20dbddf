"""What the launcher says about this process."""

import os

import pytest

from automodel.distributed.env import LaunchEnvironment, is_speaker, read_launch_environment, unset_rank_defaults

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in os.environ:
        if name.startswith(("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def give(monkeypatch):
    """Sets variables; None removes one."""

    def give(values):
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return give


def test_a_process_that_nothing_launched_is_alone():
    assert read_launch_environment() == LaunchEnvironment(
        rank=0, local_rank=0, world_size=1, local_world_size=1, launcher=None
    )


def test_the_variables_of_torchrun(give):
    give(TORCHRUN)
    assert read_launch_environment() == LaunchEnvironment(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        launcher="torchrun",
        master_addr="node7",
        master_port=29500,
        restart_count=2,
        uses_agent_store=True,
    )


def test_variables_set_by_hand_need_not_tell_how_many_processes_the_node_has(give):
    give({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"})
    launch = read_launch_environment()
    assert (launch.rank, launch.local_world_size, launch.uses_agent_store) == (5, None, False)


def test_the_variables_of_a_slurm_step(give):
    give(SLURM)
    launch = read_launch_environment()
    assert launch == LaunchEnvironment(
        rank=5,
        local_rank=1,
        world_size=7,
        local_world_size=3,
        launcher="slurm",
        master_addr="node07",
        master_port=launch.master_port,
    )
    assert 15_000 <= launch.master_port < 30_000


def test_slurms_meeting_place_can_be_chosen_and_differs_between_steps(give):
    give(SLURM)
    port = read_launch_environment().master_port
    give({"SLURM_STEP_ID": "1"})
    assert read_launch_environment().master_port != port
    give({"MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (read_launch_environment().master_addr, read_launch_environment().master_port) == ("other", 1234)


def test_torchruns_variables_come_before_slurms(give):
    give({**SLURM, "WORLD_SIZE": "1"})
    assert read_launch_environment().world_size == 1
    give(TORCHRUN)
    assert read_launch_environment().launcher == "torchrun"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        # The script of a batch job: it has the job's number of tasks, but runs once.
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_ID": None, "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
    ids=["one task", "batch script"],
)
def test_a_single_task_of_slurm_is_launched_by_nobody(changes, give):
    give({**SLURM, **changes})
    assert read_launch_environment() == LaunchEnvironment()


def test_a_step_that_only_says_the_number_of_tasks_in_the_older_way(give):
    give({**SLURM, "SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "7"})
    assert read_launch_environment().world_size == 7


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "1.0"])
def test_a_variable_that_is_no_integer_is_named(name, value, give):
    give({name: value})
    with pytest.raises(ValueError, match=f"environment variable {name} must be an integer, got '{value}'"):
        read_launch_environment()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2, but LOCAL_RANK is not set"),
        ({**TORCHRUN, "RANK": "8"}, "RANK must be from 0 to 7, got 8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK must be from 0 to 7, got -1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK must be from 0 to 3, got 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be positive, got 0"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT must be an integer, got 'http'"),
        ({**SLURM, "SLURM_PROCID": "7"}, "SLURM_PROCID must be from 0 to 6, got 7"),
        ({**SLURM, "SLURM_LOCALID": None}, "SLURM_STEP_NUM_TASKS is 7, but SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_LOCALID": "3"}, "SLURM_LOCALID must be from 0 to 2, got 3"),
    ],
)
def test_variables_that_contradict_each_other_are_named(values, message, give):
    give(values)
    with pytest.raises(ValueError, match=f"environment variable {message}"):
        read_launch_environment()


def test_what_ranks_on_one_machine_share_is_divided_unless_it_is_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert unset_rank_defaults(1) == {
        "OMP_NUM_THREADS": str(cores),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    assert unset_rank_defaults(1000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert unset_rank_defaults(2) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        (TORCHRUN, False),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True),
        (SLURM, False),
        # Whoever has a rank that is none may be the only one to know.
        (TORCHRUN | {"RANK": "first"}, True),
    ],
)
def test_who_tells_a_mistake_that_all_make(give, values, expected):
    give(values)
    assert is_speaker() is expected
