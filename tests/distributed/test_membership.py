"""Membership in a job as a library: joining, sharing, meeting, ending."""

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from automodel.distributed.env import LaunchEnvironment
from automodel.distributed.failures import PeerFailureError
from automodel.distributed.membership import JoinError, Membership

CPU = torch.device("cpu")


KEPT = []


def forget_group():
    """Makes the pool's group unknown, its connections left open, since other ranks may still be connecting."""
    KEPT[:] = [dist.group.WORLD]
    dist.destroy_process_group()


def launch(rank, world_size, port, **changes):
    return LaunchEnvironment(
        rank=rank, local_rank=rank, world_size=world_size, master_addr="localhost", master_port=port, **changes
    )


@pytest.fixture
def port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def test_a_process_alone_is_a_member_at_no_cost():
    with Membership.join(LaunchEnvironment(), timeout_seconds=1) as membership:
        membership.share("name", "value")
        group = membership.start_group(backend="anything", device=CPU, timeout_minutes=1)
        assert (group.rank, group.size, group.process_group) == (0, 1, None)
        assert (membership.rank, membership.size, membership.is_main) == (0, 1, True)
    assert not dist.is_initialized()
    membership.close()


def meet(rank, world_size, port):
    forget_group()
    with Membership.join(launch(rank, world_size, port), timeout_seconds=30) as membership:
        if membership.is_main:
            membership.share("name", "value")
        value = "value" if membership.is_main else membership.receive("name")
        group = membership.start_group(backend=None, device=CPU, timeout_minutes=1)
        total = group.sum([1.0])
        backend = dist.get_backend()
    membership.close()
    return value, total, backend, dist.is_initialized(), threading.active_count()


def test_ranks_meet_and_end(ranks, port):
    for times in range(2):  # a second job of the same processes, at the same port
        results = ranks.run(3, meet, port)
        assert [result[:4] for result in results] == [("value", [3.0], "gloo", False)] * 3
        if times == 0:
            before = [result[4] for result in results]
    assert [result[4] for result in results] == before  # no thread is left


def meet_again(rank, world_size, port):
    """Two jobs in one store, as after a restart by torchrun."""
    forget_group()
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    KEPT.append(store)  # torchrun's store outlives the ranks
    values = []
    for restart in range(2):
        place = launch(rank, world_size, store.port, restart_count=restart, uses_agent_store=True)
        with Membership.join(place, timeout_seconds=30) as membership:
            if membership.is_main:
                membership.share("name", str(restart))
                values.append(str(restart))
            else:
                values.append(membership.receive("name"))
            membership.start_group(backend=None, device=CPU, timeout_minutes=1).barrier()
    return values


def test_a_restarted_job_finds_nothing_of_the_one_before(ranks, port):
    assert ranks.run(2, meet_again, port) == [["0", "1"]] * 2


def borrow(rank, world_size):
    with Membership.join(launch(rank, world_size, None), timeout_seconds=1) as membership:
        if membership.is_main:
            membership.share("name", "value")
        value = "value" if membership.is_main else membership.receive("name")
        group = membership.start_group(backend="unknown", device=CPU, timeout_minutes=1)
        total = group.sum([1.0])
    return value, total, dist.is_initialized()


def test_a_group_that_exists_is_used_and_left_alone(ranks):
    assert ranks.run(2, borrow) == [("value", [2.0], True)] * 2


def fail_on_one(rank, world_size, port, failing):
    forget_group()
    membership = Membership.join(launch(rank, world_size, port), timeout_seconds=30)
    told = []
    membership.on_peer_failure(told.append)
    try:
        with membership:
            if rank == failing:
                raise ValueError("no such thing")
            if rank == 0:
                membership.start_group(backend=None, device=CPU, timeout_minutes=1)
            membership.receive("nothing")
    except (ValueError, PeerFailureError) as error:
        return str(error), [failure.rank for failure in told], membership.announce_failure(error)
    return "no error"


@pytest.mark.parametrize("failing", [0, 2])
def test_waiting_ranks_learn_of_a_failure(failing, ranks, port):
    expected = [(f"rank {failing} failed: ValueError: no such thing", [failing], False)] * 3
    expected[failing] = ("no such thing", [], True)
    assert ranks.run(3, fail_on_one, port, failing) == expected


def announce(rank, world_size, port):
    forget_group()
    membership = Membership.join(launch(rank, world_size, port), timeout_seconds=30)
    membership.start_group(backend=None, device=CPU, timeout_minutes=1).barrier()
    first = membership.announce_failure(OSError(f"disk of rank {rank}"))
    membership.close()
    return first


def test_of_several_failures_one_is_the_first(ranks, port):
    assert sorted(ranks.run(4, announce, port)) == [False, False, False, True]


def refuse_backend(rank, world_size, port):
    forget_group()
    membership = Membership.join(launch(rank, world_size, port), timeout_seconds=30)
    with pytest.raises(ValueError, match=r"dist_env\.backend"), membership:
        membership.start_group(backend="carrier pigeon", device=CPU, timeout_minutes=1)
    return dist.is_initialized()


def test_an_unknown_backend_is_refused_before_anybody_waits(ranks, port):
    assert ranks.run(2, refuse_backend, port) == [False, False]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_the_meeting_place_must_be_known(name):
    place = {"master_addr": "localhost", "master_port": 1234, name.lower(): None}
    with pytest.raises(ValueError, match=f"environment variable {name} is not set: the 2 ranks meet there"):
        Membership.join(LaunchEnvironment(world_size=2, **place), timeout_seconds=1)


def test_a_meeting_place_where_nobody_is(port):
    message = rf"localhost:{port} \(MASTER_ADDR, MASTER_PORT\), which could not be reached within 0.005 minutes"
    with pytest.raises(JoinError, match=message):
        Membership.join(launch(1, 2, port), timeout_seconds=0.3)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(JoinError, match=rf"the ranks cannot meet at port {port} \(MASTER_PORT\) of this host"):
            Membership.join(launch(0, 2, port), timeout_seconds=1)
