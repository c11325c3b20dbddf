"""A plain pytest collects the benchmarks and skips them; `pytest bench --benchmark-only` runs them and nothing else."""

import shutil
import subprocess
import sys

import pytest

from house_rules import REPOSITORY


@pytest.mark.parametrize(
    ("arguments", "summary"), [([], "1 passed, 1 skipped"), (["bench", "--benchmark-only"], "1 passed")]
)
def test_benchmarks_run_only_when_asked_for(tmp_path, arguments, summary):
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for name, text in {
        "tests/test_plain.py": "def test_plain():\n    pass\n",
        "bench/bench_sum.py": "def test_sum(benchmark):\n    benchmark.pedantic(sum, args=([1],), rounds=1)\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert f"= {summary} in" in done.stdout, done.stdout + done.stderr
