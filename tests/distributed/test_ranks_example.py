"""How a test with several ranks is written: a function at module level, sent to the session's pool by `ranks.run`."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankError


def total(rank, world_size, base):
    value = torch.tensor([float(base + rank)])
    dist.all_reduce(value)
    return value


def fail_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def hang_on_rank_one(rank, world_size):
    if rank == 1:
        print("going to sleep")
        time.sleep(600)


def kill_rank_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def describe(rank, world_size):
    leftover = os.environ.get("LEFT_BEHIND")
    os.environ["LEFT_BEHIND"] = "by the last case"
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "environment": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
        "leftover": leftover,
        "pid": os.getpid(),
        "folder": str(Path.cwd()),
        "threads": torch.get_num_threads(),
        "draw": torch.rand(1).item(),
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce(ranks, world_size):
    values = ranks.run(world_size, total, 10)
    assert [value.item() for value in values] == [sum(10 + rank for rank in range(world_size))] * world_size


def test_cases_share_processes_and_nothing_else(ranks):
    first, second = ranks.run(2, describe), ranks.run(2, describe)
    assert [row["pid"] for row in first] == [row["pid"] for row in second]
    assert second == first
    assert [row["rank"] for row in first] == [0, 1]
    assert {row["world_size"] for row in first} == {2}
    assert [row["environment"] for row in first] == [("0", "2"), ("1", "2")]
    assert {row["leftover"] for row in second} == {None}
    assert {row["threads"] for row in first} == {1}
    assert first[0]["draw"] == first[1]["draw"]


def test_ranks_see_the_tests_environment_and_folder(ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT_BEHIND", "by the test")
    monkeypatch.chdir(tmp_path)
    (row,) = ranks.run(1, describe)
    assert row["leftover"] == "by the test"
    assert row["folder"] == str(tmp_path)


def test_an_exception_names_its_rank_and_the_pool_works_afterwards(ranks):
    with pytest.raises(RankError, match=r"\Arank 1 of 2 raised ValueError: this rank has had enough") as caught:
        ranks.run(2, fail_on_rank_one)
    assert 'raise ValueError("this rank has had enough")' in str(caught.value), "the traceback shows the line"
    assert "still running, and ended by the pool: rank 0" in str(caught.value)
    assert list(caught.value.failures) == [1]
    assert [value.item() for value in ranks.run(2, total, 0)] == [1.0, 1.0]


def test_a_hang_names_the_ranks_that_did_not_answer_and_where_they_are(fresh_ranks):
    fresh_ranks.run(2, total, 0)
    with pytest.raises(RankError, match=r"\Ano answer within 1 s from rank 1 of 2") as caught:
        fresh_ranks.run(2, hang_on_rank_one, timeout=1.0)
    assert "hang_on_rank_one" in str(caught.value)
    assert caught.value.failures == {1: "did not answer"}


def test_a_killed_rank_is_reported_as_the_cause(fresh_ranks):
    with pytest.raises(RankError, match=r"\Arank 1 of 2 died of SIGKILL") as caught:
        fresh_ranks.run(2, kill_rank_one)
    assert caught.value.failures[1] == "died of SIGKILL"
