"""Loading a recipe: reading, typing and wrapping it; nothing is imported or resolved.

`fresh process` gives the CPU seconds, user and system, of a whole child process: what loading costs a command beyond
importing yaml is the difference between the two. The aim for that is 0.030 s.
"""

import resource
import subprocess
import sys

import pytest

from automodel.config.loader import load_yaml_config
from automodel.recipes.catalogue import find_recipe

LOAD_AIM_BEYOND_YAML = 0.030
LOAD = "from automodel.config.loader import load_yaml_config; load_yaml_config({!r})"


def children_cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_load_recipe(benchmark):
    benchmark.extra_info.update(device="cpu", path="yaml")
    benchmark.pedantic(load_yaml_config, args=(find_recipe("hybrid_tiny"),), rounds=50, warmup_rounds=2)


def test_print_recipe(benchmark):
    config = load_yaml_config(find_recipe("hybrid_tiny"))
    benchmark.extra_info.update(device="cpu", path="yaml")
    benchmark.pedantic(str, args=(config,), rounds=50, warmup_rounds=2)


def test_load_a_large_recipe(benchmark, tmp_path):
    """A thousand sections of ten keys, near the limits of what a file may hold."""
    file = tmp_path / "large.yaml"
    keys = "".join(f"  key_{n}: value {n}\n" for n in range(10))
    file.write_text("".join(f"section_{n}:\n{keys}" for n in range(1000)))
    benchmark.extra_info.update(device="cpu", path="yaml", values=11_000)
    benchmark.pedantic(load_yaml_config, args=(file,), rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="config, CPU time of a fresh process", timer=children_cpu_seconds)
@pytest.mark.parametrize("name", ["import yaml", "load a recipe"])
def test_cpu_time(benchmark, name):
    code = "import yaml" if name == "import yaml" else LOAD.format(str(find_recipe("hybrid_tiny")))
    benchmark.extra_info.update(device="cpu", path=name, unit="CPU seconds", aim_beyond_yaml=LOAD_AIM_BEYOND_YAML)
    benchmark.pedantic(
        subprocess.run, args=([sys.executable, "-c", code],), kwargs={"check": True}, rounds=10, warmup_rounds=2
    )
