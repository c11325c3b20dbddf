"""A save that is killed at any moment leaves checkpoints that load whole, and pointers to such ones only."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from automodel.checkpoint.directories import (
    LATEST,
    LOWEST_VAL,
    find_complete_checkpoints,
    find_latest_checkpoint,
    is_checkpoint_incomplete,
    read_checkpoint_pointer,
)

SCRIPT = Path(__file__).with_name("saving_process.py")


@pytest.fixture(scope="module")
def saving():
    spec = importlib.util.spec_from_file_location("saving_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def saver():
    """The process of saving_process.py; it is asked for saves and its forks are killed."""
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(root, saves, *, keep=None, die_before=None, kill_after=None):
        """Return the values whose saves returned before the process died."""
        request = {"root": str(root), "saves": saves, "keep": keep, "die_before": die_before}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        if kill_after is not None:
            threading.Timer(kill_after, os.kill, (pid, signal.SIGKILL)).start()
        lines = iter(process.stdout.readline, "end\n")
        return [float(line.split()[1]) for line in lines]

    yield run
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def value_of(saving, checkpoint):
    """Load a checkpoint and return the one value that all of it holds."""
    state = saving.make_state()
    saving.make_checkpointer(checkpoint.parent, None).restore(checkpoint, state)
    buffers = [state.optimizer.state[parameter]["momentum_buffer"] for parameter in state.model.parameters()]
    values = set(torch.cat([tensor.flatten() for tensor in (*state.model.parameters(), *buffers)]).tolist())
    assert len(values) == 1, f"{checkpoint} mixes {values}"
    assert checkpoint.name == f"epoch_0_step_{state.step_scheduler.step}"
    assert json.loads((checkpoint / "losses.json").read_text()) == {"val_loss": values.copy().pop()}
    return values.pop()


def check(saving, root, written):
    """Every checkpoint that looks complete loads and holds one of the values written; so does what LATEST means.

    This holds when the process is gone, and when the next job has opened the folder; returns what that one finds.
    """
    found = check_as_it_is(saving, root, written)
    if not neighbours(root):
        return found
    store = saving.make_checkpointer(root, None)
    store.open()
    store.close()
    return check_as_it_is(saving, root, written)


def neighbours(root):
    """The hidden directories of saves over complete checkpoints."""
    return [path for path in root.iterdir() if path.name.startswith(".epoch")]


def check_as_it_is(saving, root, written):
    """The same for the folder as it stands."""
    values = {path: value_of(saving, path) for path in find_complete_checkpoints(root)}
    assert set(values.values()) <= set(written)
    latest = find_latest_checkpoint(root)
    assert latest in values or (latest is None and not values)
    for name in (LATEST, LOWEST_VAL):
        target = read_checkpoint_pointer(root, name)
        assert target is None or target in values or is_checkpoint_incomplete(target)
    return latest, values


def test_kills_at_random_moments(saving, saver, tmp_path):
    # The steps repeat, so that directories are saved over, also the one that LATEST points to.
    draw = random.Random(20)
    root = tmp_path / "checkpoints"
    assert saver(root, [(1, 1.0)]) == [1.0]
    value, written = 1, [1.0]
    for _ in range(8):
        saves = []
        for _ in range(100):
            value += 1
            saves.append((draw.choice((3, 5, 5, 8, 13)), float(value)))
        returned = saver(root, saves, keep=draw.choice((None, 2)), kill_after=draw.uniform(0.01, 0.2))
        assert len(returned) < len(saves), "the process ended before it was killed"
        # The save that was running may have been complete already.
        written += [*returned, saves[len(returned)][1]]
        latest, values = check(saving, root, written)
        assert latest is not None
        if returned:
            assert values[latest] >= returned[-1], "a finished save was lost"
        value = int(written[-1])


@pytest.fixture
def three_saves(saver, tmp_path):
    """Make folders that hold steps 1, 2 and 3 with values 10, 20 and 30."""
    original = tmp_path / "original"
    assert saver(original, [(1, 10.0), (2, 20.0), (3, 30.0)]) == [10.0, 20.0, 30.0]

    def copy(number):
        return Path(shutil.copytree(original, tmp_path / str(number), symlinks=True))

    return copy


def test_kills_before_changes_of_a_save_over_the_only_one(saving, saver, tmp_path):
    """The very checkpoint that is saved again is the only one: it must be found until the new one is whole."""
    original = tmp_path / "original"
    assert saver(original, [(3, 30.0)]) == [30.0]
    outcomes = []
    for number in range(1, 200, 3):
        root = Path(shutil.copytree(original, tmp_path / str(number), symlinks=True))
        survived = saver(root, [(3, 5.0)], die_before=number) == [5.0]
        latest, values = check(saving, root, (30.0, 5.0))
        assert latest == root / "epoch_0_step_3"
        outcomes.append(values[latest])
        assert neighbours(root) == [], "the remains of the save were not removed"
        if survived:
            break
    assert survived, "the save has more changes than were tried"
    assert list(dict.fromkeys(outcomes)) == [30.0, 5.0]
    assert min(outcomes.count(30.0), outcomes.count(5.0)) > 3, "the save was killed at too few places"


@pytest.mark.parametrize("number", [2, 9, 20])
def test_the_next_run_saves_over_what_a_kill_left(saving, saver, three_saves, number):
    root = three_saves(number)
    assert saver(root, [(3, 5.0)], die_before=number) == []
    assert saver(root, [(3, 4.0), (4, 40.0)], keep=1) == [4.0, 40.0]
    latest, values = check(saving, root, (4.0, 40.0))
    assert values[latest] == 40.0
    assert read_checkpoint_pointer(root, LOWEST_VAL) == root / "epoch_0_step_3"


def test_kills_before_changes_while_old_checkpoints_are_removed(saving, saver, three_saves):
    counts = []
    # Five changes lie between the end of the save and the first removal: one of them is hit.
    for number in range(1, 400, 5):
        root = three_saves(number)
        survived = saver(root, [(4, 40.0)], keep=1, die_before=number) == [40.0]
        latest, values = check(saving, root, (10.0, 20.0, 30.0, 40.0))
        assert values[latest] in (30.0, 40.0)
        assert values[root / "epoch_0_step_1"] == 10.0, "LOWEST_VAL keeps it"
        counts.append(len(values))
        if survived:
            break
    assert survived
    assert {path.name for path in values} == {"epoch_0_step_1", "epoch_0_step_4"}
    assert {3, 4, 2} <= set(counts), "the removal was never interrupted"
