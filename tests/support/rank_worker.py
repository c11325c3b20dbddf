"""One process of a pool of ranks: waits for cases, runs each as one rank of a fresh gloo group, sends the outcome back.

`rank_pool` starts `main` in a process of its own. A message is a pickled dict. A case holds `case`, `rank`,
`world_size`, `port`, `timeout`, `file`, `module`, `name`, `path`, `folder`, `environment` and `args` (pickled on its
own, since reading it needs the test's module). An answer holds `value` (pickled on its own), or `error` and `summary`.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["main"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
STORE_SLACK = timedelta(seconds=60)  # the pool's own deadline comes first and names the ranks


def main(connection: Connection, index: int, output: str) -> None:
    """Serves cases until the pool closes the connection or its process is gone.

    Args:
        connection: the messages; closed by the pool to end this process.
        index: the rank of this process in every case; rank 0 hosts the store in which groups meet.
        output: file that receives everything this process writes.
    """
    with Path(output).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.setsid()
    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if index == 0 else None
    connection.send_bytes(pickle.dumps({"port": store.port if store else None}))
    while True:
        try:
            case = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if store is None:
            store = dist.TCPStore("127.0.0.1", case["port"], is_master=False, wait_for_workers=False)
        connection.send_bytes(pickle.dumps(answer(case, store=store)))


def end_with_parent() -> None:
    """Waits for the end of the pool's process, then kills this one and all that it started."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def answer(case: dict[str, Any], *, store: dist.Store) -> dict[str, Any]:
    """Runs one case. A rank that fails keeps its group open: the others wait in it until the pool ends them."""
    faulthandler.dump_traceback_later(case["timeout"])
    try:
        value = run(case, store=store)
    except BaseException as error:  # noqa: BLE001 - pytest.fail and sys.exit too are the test's failure
        summary = traceback.format_exception_only(error)[-1].strip()
        return {"error": traceback.format_exc(), "summary": summary}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"value": value}


def run(case: dict[str, Any], *, store: dist.Store) -> bytes:
    """The pickled return value of `function(rank, world_size, *args)` inside a group made for this case."""
    rank, world_size = case["rank"], case["world_size"]
    sys.path[:] = case["path"]
    os.environ.clear()
    os.environ.update(case["environment"], GLOO_SOCKET_IFNAME=LOOPBACK)
    function: Any = load_module(case["module"], file=case["file"])
    for part in case["name"].split("."):
        function = getattr(function, part)
    args = pickle.loads(case["args"])
    os.chdir(case["folder"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"case-{case['case']}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=case["timeout"]) + STORE_SLACK,
    )
    # What DTensor remembers of the meshes of earlier cases names groups that are gone.
    clear_dtensor_cache()
    value = pickle.dumps(function(rank, world_size, *args))
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def clear_dtensor_cache() -> None:
    """Forgets how DTensor divided operations before, where this process has used DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def load_module(name: str, *, file: str) -> ModuleType:
    """The module `name`: imported when Python finds the same file under that name, else made from the file."""
    known = sys.modules.get(name)
    if known is not None and known.__file__ == file:
        return known
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
