"""A process that saves checkpoints until it is killed: `saving_process.py`, then one JSON request per line.

Each request is served by a fork, so that PyTorch is imported once: `{"root": folder, "saves": [[step, value], ...],
"keep": n or null, "die_before": n or null}`. Every save is of parameters, optimizer state and losses that are all
`value`, so that a mixture of two saves shows. The fork says its process id, then each value whose save returned; with
`die_before` it kills itself with SIGKILL just before that many-th operation that changes the disk. `end` follows it.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from automodel.checkpoint.store import CheckpointConfig, Checkpointer, RunState

_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"})


class Position:
    """Stands in for scheduler, loader and random state: a position that is saved."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def make_state(value: float = 0.0, step: int = 0) -> RunState:
    """Make a state in which every number is `value`."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.0)
    optimizer.param_groups[0]["momentum"] = 0.9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return RunState(
        model=model, optimizer=optimizer, step_scheduler=Position(step), rng=Position(), dataloader=Position(step)
    )


def make_checkpointer(root: Path, keep: int | None) -> Checkpointer:
    """Make the store that the process and the test share."""
    config = CheckpointConfig(save_consolidated=False, max_recent_checkpoints=keep)
    return Checkpointer(config, root=root, config_text="")


def die_before(number: int) -> None:
    """Kill this process before that many-th change on the disk, counted from 1."""
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _CHANGES or opens:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def serve(request: dict) -> None:
    """Make the saves of one request."""
    store = make_checkpointer(Path(request["root"]), request["keep"])
    say(str(os.getpid()))
    if request["die_before"] is not None:
        die_before(request["die_before"])
    for step, value in request["saves"]:
        store.save(make_state(value, step), losses={"val_loss": value}, final=False)
        say(f"saved {value}")


def say(line: str) -> None:
    """Write a line at once, past any buffer."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first save imports much of PyTorch; the forks inherit it.
    with tempfile.TemporaryDirectory() as folder:
        make_checkpointer(Path(folder), None).save(make_state(), losses={}, final=False)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            serve(json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        say("end")
