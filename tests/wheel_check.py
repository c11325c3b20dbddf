"""Builds the wheel, installs it in a fresh environment elsewhere and trains with it from an empty folder.

    python tests/wheel_check.py

Nothing of the checkout is in reach of the installed package: the wheel is built from a copy, the environment and the
working folder lie in a temporary directory, and PYTHONPATH is unset. Prints each check as it passes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

__all__ = ["main"]

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "automodel", "automodel_kernels", "autotune_cache")
FIND_DATA = """
import automodel, automodel_kernels
from automodel_kernels.tuning.table import shipped_tables
folder = shipped_tables()
assert (folder / "README.md").is_file(), folder
for package in (automodel, automodel_kernels):
    assert (folder.parent / package.__name__ / "py.typed").is_file(), package.__name__
print(folder)
"""


def run(*command: str | Path, folder: Path, shows: str = "") -> str:
    """What a command prints; raises SystemExit when it fails, or does not print `shows`."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    environment["AUTOMODEL_CACHE"] = str(folder.parent / "cache")
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    line = " ".join(str(part) for part in command)
    if done.returncode != 0 or shows not in done.stdout:
        missing = f" and does not show {shows!r}" if shows not in done.stdout else ""
        raise SystemExit(f"{line}\n{done.stdout}\nwheel check: status {done.returncode}{missing}")
    return done.stdout


def passed(what: str) -> None:
    """Prints a check that passed."""
    print(f"wheel check: {what}", flush=True)


def build_wheel(folder: Path) -> Path:
    """The wheel, built from a copy of the sources, so that no stale build folder leaks into it."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", folder / "wheels"]
    run(sys.executable, "-m", "pip", "wheel", *options, copy, folder=folder)
    (wheel,) = (folder / "wheels").glob("automodel-*.whl")
    return wheel


def install(wheel: Path, *, folder: Path) -> Path:
    """The `bin` folder of a new environment that holds the wheel and its pinned dependencies."""
    venv.create(folder / "environment", with_pip=True)
    binaries = folder / "environment" / "bin"
    options = ["--disable-pip-version-check", "--constraint", REPOSITORY / "constraints.txt"]
    run(binaries / "python", "-m", "pip", "install", *options, wheel, folder=folder)
    return binaries


def check(binaries: Path, *, folder: Path) -> None:
    """Runs the installed commands from an empty folder."""
    empty = folder / "empty"
    empty.mkdir()
    automodel = binaries / "automodel"
    version = run(automodel, "--version", folder=empty).strip()
    passed(f"automodel --version prints {version!r}")
    run(binaries / "am", "--help", folder=empty, shows="run")
    passed("am --help works")
    run(automodel, "recipes", folder=empty, shows="hybrid_tiny")
    passed("automodel recipes lists hybrid_tiny")
    tables = run(binaries / "python", "-c", FIND_DATA, folder=empty).strip()
    if not Path(tables).is_relative_to((folder / "environment").resolve()):
        raise SystemExit(f"wheel check: {tables} is not the installed folder")
    passed(f"the shipped tables are in {tables}")
    check_training(automodel, folder=empty)


def check_training(automodel: Path, *, folder: Path) -> None:
    """Trains the default recipe to its end, as `make quickstart` does, and checks what it learned."""
    output = run(automodel, "run", "hybrid_tiny", folder=folder, shows="sample completion")
    (report,) = (folder / "runs").glob("*/report.html")
    rows = [json.loads(line) for line in (report.parent / "validation.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    if abs(first["val_loss"] - math.log(4096)) > 0.2 or last["val_loss"] > 0.5 * first["val_loss"]:
        raise SystemExit(f"{output}\nwheel check: the loss went from {first['val_loss']} to {last['val_loss']}")
    if first["num_label_tokens"] < 100_000:
        raise SystemExit(f"wheel check: only {first['num_label_tokens']} tokens are held out")
    share = last["val_loss"] / first["val_loss"]
    passed(f"hybrid_tiny went from {first['val_loss']:.3f} to {last['val_loss']:.3f} ({share:.0%}): {report.name}")


def main() -> None:
    """Builds, installs and checks, in a temporary directory that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        passed(f"built {wheel.name}")
        binaries = install(wheel, folder=folder)
        passed("installed it in a fresh environment")
        check(binaries, folder=folder)


if __name__ == "__main__":
    main()
