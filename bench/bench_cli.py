"""CPU time of short commands, each in a fresh process: what a user waits for before anything happens.

The times are CPU seconds of the child process, user and system, not wall time. `extra_info` records the device, the
path that was measured and, where there is one, the aim in CPU seconds.
"""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
AUTOMODEL = [sys.executable, "-m", "automodel"]
HELP_AIM = 0.150


def children_cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


COMMANDS = {
    "python": ([sys.executable, "-c", "pass"], None),
    "import automodel": ([sys.executable, "-c", "import automodel"], None),
    "--version": ([*AUTOMODEL, "--version"], HELP_AIM),
    "--help": ([*AUTOMODEL, "--help"], HELP_AIM),
    "run --help": ([*AUTOMODEL, "run", "--help"], HELP_AIM),
    "recipes": ([*AUTOMODEL, "recipes"], None),
    "env": ([*AUTOMODEL, "env"], None),
}


@pytest.mark.benchmark(group="cli, CPU time of a fresh process", timer=children_cpu_seconds)
@pytest.mark.parametrize("name", COMMANDS)
def test_cpu_time(benchmark, name):
    command, aim = COMMANDS[name]
    benchmark.extra_info.update(device="cpu", path=name, unit="CPU seconds", aim=aim)

    def run():
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    benchmark.pedantic(run, rounds=5, iterations=1, warmup_rounds=1)
