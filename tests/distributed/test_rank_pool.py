"""The pool of ranks itself: what it accepts, and that none of its processes outlives it."""

import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rank_pool
from rank_pool import RankError

HOLDER = """
import subprocess, sys
from rank_pool import RankPool
import holding

pool = RankPool()
pool.run(2, holding.hold, sys.argv[1], timeout=600.0)
"""

HOLDING = """
import subprocess, sys, time


def hold(rank, world_size, fifo):
    # The rank and a process that it starts both keep the pipe open for as long as they live.
    with open(fifo, "w") as pipe:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[pipe.fileno()])
        pipe.write(f"{rank}\\n")
        pipe.flush()
        time.sleep(600)
"""


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


def mirror(rank, world_size, point):
    return Point(point.x + rank)


def leave(rank, world_size):
    sys.exit(3)


def fail(rank, world_size):
    pytest.fail("a verdict of the test")


def return_a_lock(rank, world_size):
    return threading.Lock()


def test_objects_of_the_test_module_travel_both_ways(ranks):
    assert ranks.run(2, mirror, Point(5)) == [Point(5), Point(6)]


@pytest.mark.parametrize("world_size", [0, -1, 5])
def test_a_world_size_without_room_is_refused(ranks, world_size):
    with pytest.raises(ValueError, match=f"world_size must be from 1 to 4, got {world_size}"):
        ranks.run(world_size, mirror, Point(0))


def test_a_function_that_cannot_be_sent_is_refused(ranks):
    def local(rank, world_size):
        return rank

    for function in (local, lambda rank, world_size: rank):
        with pytest.raises(ValueError, match=r"function must be defined at the level of a module, got .*<"):
            ranks.run(1, function)


def test_every_way_to_fail_is_reported(fresh_ranks):
    with pytest.raises(RankError, match="rank 0 of 1 raised SystemExit: 3"):
        fresh_ranks.run(1, leave)
    with pytest.raises(RankError, match="rank 0 of 1 raised Failed: a verdict of the test"):
        fresh_ranks.run(1, fail)
    with pytest.raises(RankError, match="rank 0 of 1 raised TypeError: cannot pickle"):
        fresh_ranks.run(1, return_a_lock)


def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    (tmp_path / "holding.py").write_text(HOLDING)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    paths = os.pathsep.join([str(Path(rank_pool.__file__).parent), str(tmp_path)])
    command = [sys.executable, "-c", HOLDER, str(fifo)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as parent:
        pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert read_until(pipe, lambda text: text.count(b"\n") == 2).split() in ([b"0", b"1"], [b"1", b"0"])
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            read_until(pipe, None)
        finally:
            parent.kill()
            os.close(pipe)


def read_until(pipe, done, *, timeout=120.0):
    """What comes out of the pipe until `done(text)`, or until every writer is gone when `done` is None."""
    text, deadline, seen_writer = b"", time.monotonic() + timeout, done is None
    while time.monotonic() < deadline:
        select.select([pipe], [], [], 0.1)
        try:
            piece = os.read(pipe, 4096)
        except BlockingIOError:
            continue
        text, seen_writer = text + piece, seen_writer or bool(piece)
        if done is not None and done(text):
            return text
        if not piece and seen_writer:
            assert done is None, f"the writers are gone after {text!r}"
            return text
    raise AssertionError(f"nothing more within {timeout} s after {text!r}")
