"""Runs the tests marked `interpreter` in one child pytest process with TRITON_INTERPRET=1.

Triton decides when `@triton.jit` decorates a function whether that function is compiled or interpreted, so one process
is either the one or the other. This pytest plugin puts a stand-in in the place of every selected test that carries the
mark. The first stand-in that is reached starts the child, which runs all of them; each stand-in then reports what the
child reported for its test: outcome, failure text, captured output, duration. Where TRITON_INTERPRET is set already
the tests run in place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from automodel_kernels.hardware import interpreter_enabled
from lifeline import Lifeline

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["ChildRun", "InterpreterTest", "pytest_collection_modifyitems", "pytest_runtest_makereport"]

MARK = "interpreter"
MOST_OUTPUT = 20_000  # characters of the child's output that a failure shows


class ChildRun:
    """The child process: started by the first question about a test, then a table of its reports.

    Args:
        config: the parent's pytest configuration.
        items: every test that the child has to run.
    """

    def __init__(self, config: pytest.Config, *, items: list[pytest.Item]) -> None:
        self._config = config
        self._nodeids = [item.nodeid for item in items]
        self._files = list(dict.fromkeys(str(item.path) for item in items))
        self._ran = False
        self._reports: dict[tuple[str, str], pytest.TestReport] = {}
        self._finished: set[str] = set()
        self._problem = ""

    def report(self, nodeid: str, *, when: str) -> pytest.TestReport | None:
        """The child's report of one phase of a test; None for a phase that the child did not reach."""
        self._run_once()
        return self._reports.get((nodeid, when))

    def problem(self, nodeid: str) -> str:
        """Why the child did not finish a test, with the child's output; empty if it did finish it."""
        self._run_once()
        return "" if nodeid in self._finished else self._problem

    def _run_once(self) -> None:
        if not self._ran:
            self._ran = True
            self._run()

    def _run(self) -> None:
        lifeline = Lifeline()
        try:
            with tempfile.TemporaryDirectory(prefix="interpreter-") as folder:
                rows_file, request = Path(folder, "reports.jsonl"), Path(folder, "request.json")
                rows_file.touch()
                row = {"nodeids": self._nodeids, "reports": str(rows_file), "lifeline": lifeline.child_fd}
                request.write_text(json.dumps(row), encoding="utf-8")
                done = subprocess.run(
                    self._command(request),
                    cwd=self._config.invocation_params.dir,
                    env=self._environment(),
                    pass_fds=[lifeline.child_fd],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
                rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
        finally:
            lifeline.close()
        running = self._take(rows)
        output = done.stdout.decode(errors="replace")[-MOST_OUTPUT:]
        self._problem = (
            f"the interpreter's pytest process ended with status {done.returncode} before this test was done"
            f"{f', while it ran {running}' if running else ''}; its output:\n{output}"
        )

    def _take(self, rows: list[dict[str, Any]]) -> str:
        """Fills the table; returns the test that had begun last and has no end, or an empty string."""
        running = ""
        for row in rows:
            if "started" in row:
                running = row["started"]
                continue
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=row)
            if isinstance(report.longrepr, list):  # of a skip: JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            self._reports[report.nodeid, report.when] = report
            if report.when == "teardown":
                self._finished.add(report.nodeid)
                running = ""
        return running

    def _command(self, request: Path) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "interpreter_request"]
        command += ["--interpreter-request", str(request), "--rootdir", str(self._config.rootpath)]
        if self._config.inipath is not None:
            command += ["-c", str(self._config.inipath)]
        command += [f"--tb={self._config.getoption('tbstyle')}"]
        return [*command, *self._files]

    @staticmethod
    def _environment() -> dict[str, str]:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        python_path = os.pathsep.join(path for path in paths if path)
        return {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path}


class InterpreterTest(pytest.Item):
    """Stands in for a test that the child runs. It has no marks and no fixtures: those count in the child."""

    child: ChildRun
    original: pytest.Item

    @classmethod
    def standing_in(cls, original: pytest.Item, *, child: ChildRun) -> InterpreterTest:
        """The stand-in of `original`, with the same node id."""
        item: InterpreterTest = cls.from_parent(original.parent, name=original.name)
        item.child, item.original = child, original
        return item

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test is written."""
        return self.original.reportinfo()

    def runtest(self) -> None:
        """Nothing: the child runs the test."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the stand-ins in, once all other plugins have sorted and deselected."""
    marked = [item for item in items if item.get_closest_marker(MARK)]
    if not marked or interpreter_enabled():
        return
    child = ChildRun(config, items=marked)
    items[:] = [
        InterpreterTest.standing_in(item, child=child) if item.get_closest_marker(MARK) else item for item in items
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Gives the child's report in place of the stand-in's own; a test that the child did not finish has failed."""
    own = yield
    if not isinstance(item, InterpreterTest):
        return own
    problem = item.child.problem(item.nodeid)
    if not problem:
        return item.child.report(item.nodeid, when=call.when) or own
    if call.when == "call":
        own.outcome, own.longrepr = "failed", problem
    return own
