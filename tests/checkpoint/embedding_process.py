"""A process that reads or repairs models on the disk: `embedding_process.py`, then one JSON request per line.

Each request is served by a fork, so that PyTorch is imported once; the answer is one line of JSON. `{"repair": folder,
"out": folder, "die_before": n}` kills itself with SIGKILL just before that many-th operation that changes the disk;
without "die_before" it answers the names of the files whose mode it changed.
`{"read": folder}` answers by how many bytes the anonymous memory grew at most while the input embedding was read.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from automodel.checkpoint.embedding_diagnosis import diagnose
from automodel.checkpoint.embedding_files import find_embeddings, read_squared_norms
from automodel.checkpoint.embedding_repair import repair_on_disk

_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod"})


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


def record_modes() -> list[str]:
    """A list that gets the name of each file whose mode is changed."""
    names: list[str] = []
    sys.addaudithook(lambda event, arguments: names.append(Path(arguments[0]).name) if event == "os.chmod" else None)
    return names


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def growth_while_reading(folder: Path) -> int:
    """By how many bytes the anonymous memory grows at most."""
    found = find_embeddings(folder)
    before = anonymous_bytes()
    most, done = before, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    squared_norms = read_squared_norms(found.input)
    diagnose(found, squared_norms)
    done.set()
    watcher.join()
    return max(most, anonymous_bytes()) - before


def serve(request: dict) -> object:
    """Do what one request asks for; returns the answer."""
    if "read" in request:
        return growth_while_reading(Path(request["read"]))
    found = find_embeddings(Path(request["repair"]))
    diagnosis = diagnose(found, read_squared_norms(found.input))
    names = record_modes()
    if "die_before" in request:
        die_before(request["die_before"])
    repair_on_disk(diagnosis, Path(request["out"]))
    return "done" if "die_before" in request else names


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.write(1, json.dumps(serve(json.loads(line))).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.write(1, b"\n")
