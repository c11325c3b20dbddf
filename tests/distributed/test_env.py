"""What the launcher says about this process."""

import pytest

from automodel.distributed.env import LaunchEnvironment, read_launch_environment

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
SLURM_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*NAMES, *SLURM_NAMES):
        monkeypatch.delenv(name, raising=False)


def test_a_process_that_nothing_launched_is_alone():
    assert read_launch_environment() == LaunchEnvironment(rank=0, local_rank=0, world_size=1)


def test_the_variables_of_torchrun(monkeypatch):
    for name, value in zip(NAMES, ("5", "1", "8"), strict=True):
        monkeypatch.setenv(name, value)
    assert read_launch_environment() == LaunchEnvironment(rank=5, local_rank=1, world_size=8)


def test_the_variables_of_a_slurm_step_hold_where_torchrun_gives_none(monkeypatch):
    for name, value in zip(SLURM_NAMES, ("3", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert read_launch_environment() == LaunchEnvironment(rank=3, local_rank=1, world_size=4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read_launch_environment().world_size == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "two", "1.0"])
def test_a_variable_that_is_no_integer_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variable {name} must be an integer, got '{value}'"):
        read_launch_environment()
