"""When `make` installs and when it does not. The commands in .venv/bin write down how they were called."""

import os
import shutil
import subprocess

import pytest

from house_rules import REPOSITORY

RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >> calls.txt
case "$*" in *" install "*) test ! -e broken;; esac
"""


def run_make(*arguments, folder):
    """A make of its own, also when an outer make runs these tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=inherited, capture_output=True, text=True)


@pytest.fixture
def make(tmp_path):
    """Runs a target in a folder with the real Makefile and an environment that only records; returns the calls."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
        os.utime(tmp_path / name, (1_000_000_000, 1_000_000_000))
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "automodel", "mypy", "ruff", "lint-imports"):
        (binaries / name).write_text(RECORDER)
        (binaries / name).chmod(0o755)

    def run(target, *, status=0):
        calls = tmp_path / "calls.txt"
        calls.unlink(missing_ok=True)
        done = run_make(target, folder=tmp_path)
        assert (done.returncode != 0) == bool(status), done.stdout + done.stderr
        return calls.read_text().splitlines() if calls.exists() else []

    return run


def installs(calls):
    return [call.rsplit(" ", 1)[1] for call in calls if " install " in call]


def test_quickstart_installs_once_and_without_the_developers_tools(make):
    assert installs(make("quickstart")) == ["setuptools", "."]
    assert make("quickstart") == ["automodel run hybrid_tiny"]


def test_the_developers_tools_are_added_later_and_serve_quickstart_too(make):
    make("quickstart")
    assert installs(make("types")) == ["setuptools", ".[dev]"]
    assert make("types") == ["mypy --strict"]
    assert installs(make("quickstart")) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_installs_again(make, tmp_path, name):
    make("types")
    (tmp_path / name).touch()
    os.utime(tmp_path / ".venv" / ".stamp-installed-dev", (1_500_000_000, 1_500_000_000))
    os.utime(tmp_path / ".venv" / ".stamp-installed", (1_500_000_000, 1_500_000_000))
    assert installs(make("types")) == ["setuptools", ".[dev]"]
    assert installs(make("quickstart")) == []


def test_an_installation_that_failed_is_repeated(make, tmp_path):
    (tmp_path / "broken").touch()
    assert "automodel run hybrid_tiny" not in make("quickstart", status=2)
    (tmp_path / "broken").unlink()
    assert installs(make("quickstart")) == ["setuptools", "."]


def test_every_installation_obeys_the_constraints(make):
    assert all("--constraint constraints.txt" in call for call in make("types") if " install " in call)


def test_the_gate_runs_every_check_in_order(make):
    calls = [call for call in make("test") if "pip" not in call]
    assert calls == [
        "ruff format --check automodel automodel_kernels tests bench",
        "ruff check automodel automodel_kernels tests bench",
        "mypy --strict",
        "lint-imports --no-logo",
        "python -m pytest",
        "python tests/wheel_check.py",
    ]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    assert (REPOSITORY / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


@pytest.mark.parametrize(
    ("python", "message"),
    [("./old-python", "Python 3.11 or newer is needed, and ./old-python is Python 3.9.1"), ("./none", "was not found")],
)
def test_an_unfit_python_is_named(tmp_path, python, message):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\ntest "$1" = --version && echo "Python 3.9.1"\n')
    old.chmod(0o755)
    done = run_make("quickstart", f"PYTHON={python}", folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()
