"""A process that tunes the toy sum kernel into a folder, for tests of tuning in several processes.

python kernel_tuning.py FOLDER BEST [--kill-at NUMBER | --meet OWN OTHER]: BEST is the block that its timer favours;
it kills itself while that candidate is measured, or measures only once the file OTHER is there and after making OWN.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

from automodel_kernels.hardware import Device, find_target
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning.policy import tuning_policy
from automodel_kernels.tuning.store import FolderStore, set_store
from kernel_toys import add_sum, tuned_sum

__all__ = ["TOY_GPU", "main"]

TOY_GPU = Device(
    name="Toy GPU 9000",
    capability=(9, 0),
    sm_count=132,
    shared_memory=232_448,
    warp_size=32,
    target=find_target("sm_90"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("best", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--meet", nargs=2, type=Path)
    options = parser.parse_args()
    measured = 0

    def timer(record):
        nonlocal measured
        measured += 1
        if measured == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.meet is not None:
            own, other = options.meet
            own.touch()
            deadline = time.monotonic() + 60
            while not other.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return 1.0 if record.arguments["BLOCK"] == options.best else 2.0

    set_store(FolderStore(options.folder))
    with target_driver(TOY_GPU, timer=timer) as driver, tuning_policy("tune"):
        add_sum(tuned_sum(), torch.empty(100, device="meta"), torch.empty(1, device="meta"))
    sys.stdout.write(str(driver.launches[-1].arguments["BLOCK"]))


if __name__ == "__main__":
    main()
