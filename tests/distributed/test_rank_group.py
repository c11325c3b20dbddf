"""Exchanges of small values between ranks."""

import pytest
import torch
import torch.distributed as dist

from automodel.distributed.rank_group import PeerError, RankGroup


def world():
    return RankGroup(dist.group.WORLD)


def exchange(rank, world_size):
    group = world()
    assert (group.rank, group.size, group.is_main) == (rank, world_size, rank == 0)
    tensors = [torch.full((2,), float(rank)), torch.tensor(rank)]
    group.broadcast_tensors(tensors)
    group.barrier()
    return {
        "gathered": group.all_gather({"rank": rank}),
        "broadcast": group.broadcast(f"from {rank}"),
        "sum": group.sum([rank, 0.5]),
        "max": group.max([rank, -rank]),
        "any": (group.any(rank == 1), group.any(False)),
        "tensors": [tensor.tolist() for tensor in tensors],
    }


def test_every_rank_gets_the_same_answers(ranks):
    expected = {
        "gathered": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "broadcast": "from 0",
        "sum": [3.0, 1.5],
        "max": [2.0, 0.0],
        "any": (True, False),
        "tensors": [[0.0, 0.0], 0],
    }
    assert ranks.run(3, exchange) == [expected] * 3


def test_a_process_alone_needs_no_group():
    alone = RankGroup()
    assert (alone.rank, alone.size, alone.is_main, alone.process_group) == (0, 1, True, None)
    assert alone.all_gather("x") == ["x"]
    assert alone.broadcast("x") == "x"
    assert alone.sum([1, 2.5]) == [1.0, 2.5]
    assert alone.any(True)
    alone.barrier()
    alone.broadcast_tensors([torch.ones(1)])
    assert alone.in_turn(lambda: 3, is_node_leader=True) == 3
    with pytest.raises(KeyError), alone.together():
        raise KeyError("x")


def fail_on_one(rank, world_size):
    try:
        with world().together():
            if rank == 1:
                raise OSError("no space")
    except (OSError, PeerError) as error:
        after = world().sum([1.0])
        return type(error).__name__, str(error), after


def test_a_failure_of_one_rank_is_everybodys_and_the_group_goes_on(ranks):
    peer = ("PeerError", "rank 1 failed: OSError: no space", [3.0])
    assert ranks.run(3, fail_on_one) == [peer, ("OSError", "no space", [3.0]), peer]


def take_turns(rank, world_size, folder):
    def make():
        made = sorted(file.name for file in folder.iterdir())
        (folder / str(rank)).touch()
        return made

    return world().in_turn(make, is_node_leader=rank in (0, 2))


def test_rank_zero_goes_first_then_one_rank_of_each_node(ranks, tmp_path):
    results = ranks.run(4, take_turns, tmp_path)
    assert results[0] == []
    assert results[2] == ["0"]
    assert {"0", "2"} <= set(results[1])
    assert {"0", "2"} <= set(results[3])


def fail_in_turn(rank, world_size):
    calls = []

    def make():
        calls.append(rank)
        raise ValueError("bad corpus")

    try:
        world().in_turn(make, is_node_leader=rank == 0)
    except (ValueError, PeerError) as error:
        return type(error).__name__, calls


def test_the_others_do_not_try_what_failed_on_rank_zero(ranks):
    assert ranks.run(2, fail_in_turn) == [("ValueError", [0]), ("PeerError", [])]
