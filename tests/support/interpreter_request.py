"""The child's side of the interpreter tests: a pytest plugin that runs the asked tests and writes their reports.

The parent starts `pytest -p interpreter_request --interpreter-request FILE`. FILE is JSON: `nodeids`, the tests to run;
`reports`, the file to which one JSON line per test report is appended; `lifeline`, a descriptor to watch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lifeline import watch_lifeline

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RunRequest", "pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interpreter-request", type=Path, help="run the tests that this JSON file asks for")


def pytest_configure(config: pytest.Config) -> None:
    request = json.loads(config.getoption("--interpreter-request").read_text())
    watch_lifeline(request["lifeline"], lambda: os._exit(1))
    config.pluginmanager.register(RunRequest(config, request))


class RunRequest:
    """Keeps the asked tests only, and appends every report to the file as soon as it exists."""

    def __init__(self, config: pytest.Config, request: dict[str, Any]) -> None:
        self._config = config
        self._nodeids = frozenset(request["nodeids"])
        self._reports = Path(request["reports"])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._nodeids]

    def pytest_runtest_logstart(self, nodeid: str, location: Sequence[object]) -> None:
        self._append({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def _append(self, row: dict[str, Any]) -> None:
        with self._reports.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
