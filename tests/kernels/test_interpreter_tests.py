"""The machinery of the interpreter tests, driven from outside: a pytest process over a few tests made here."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import interpreter_tests

CASES = """
import os
import signal

import pytest


@pytest.fixture
def broken():
    raise RuntimeError("the fixture broke")


@pytest.mark.interpreter
class TestMarked:
    def test_passes(self):
        assert os.environ["TRITON_INTERPRET"] == "1"

    def test_fails(self):
        total = 41
        assert total == 42, "the sum is off"

    def test_skips(self):
        pytest.skip("not today")

    @pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="decided in the child")
    def test_skips_by_mark(self):
        raise AssertionError

    @pytest.mark.xfail(reason="known")
    def test_fails_as_expected(self):
        raise AssertionError

    def test_errors(self, broken):
        raise AssertionError

    @pytest.mark.parametrize("name", ["a b", "c::d", "[e]"])
    def test_odd_name(self, name):
        with open("odd_names", "a") as file:
            file.write(name + "\\n")


def test_ordinary():
    assert "TRITON_INTERPRET" not in os.environ
"""

CRASH = """
import os
import signal

import pytest

pytestmark = pytest.mark.interpreter


def test_before():
    pass


def test_crashes():
    os.write(2, b"last words")
    os.kill(os.getpid(), signal.SIGKILL)


def test_after():
    pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest over a module with the given text; returns {test name: (outcome, text)} and the whole output."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = interpreter: x\n")

    def run(text, *arguments, **environment):
        (tmp_path / "test_cases.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "interpreter_tests", "-p", "no:cacheprovider"]
        repository = Path(interpreter_tests.__file__).parents[2]
        paths = os.pathsep.join([str(repository), str(repository / "tests" / "support")])
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [*command, "--junitxml=out.xml", *(arguments or ["test_cases.py"])],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
            capture_output=True,
            text=True,
        )
        outcomes = {}
        for case in ET.parse(tmp_path / "out.xml").iter("testcase"):
            result = case.find("*")
            outcomes[case.get("name")] = (
                ("passed", "") if result is None else (result.tag, ET.tostring(result, "unicode"))
            )
        return outcomes, done.stdout + done.stderr

    return run


def test_every_outcome_of_the_child_is_the_parents(run_pytest, tmp_path):
    outcomes, output = run_pytest(CASES)
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        "test_passes": "passed",
        "test_fails": "failure",
        "test_skips": "skipped",
        "test_skips_by_mark": "skipped",
        "test_fails_as_expected": "skipped",
        "test_errors": "error",
        "test_odd_name[a b]": "passed",
        "test_odd_name[c::d]": "passed",
        "test_odd_name[[e]]": "passed",
        "test_ordinary": "passed",
    }
    assert "1 failed, 5 passed, 2 skipped, 1 xfailed, 1 error" in output
    assert "the sum is off" in outcomes["test_fails"][1]
    assert "assert 41 == 42" in outcomes["test_fails"][1]
    assert "not today" in outcomes["test_skips"][1]
    assert "decided in the child" in outcomes["test_skips_by_mark"][1]
    assert "the fixture broke" in outcomes["test_errors"][1]
    assert (tmp_path / "odd_names").read_text() == "a b\nc::d\n[e]\n", "each test runs once, in one child"


def test_only_the_selected_tests_run_in_the_child(run_pytest, tmp_path):
    outcomes, _ = run_pytest(CASES, "test_cases.py", "-k", "odd_name and d")
    assert "test_odd_name[c::d]" in outcomes
    assert "c::d" in (tmp_path / "odd_names").read_text().split("\n")
    assert "test_passes" not in outcomes
    outcomes, _ = run_pytest(CASES, "test_cases.py::TestMarked::test_fails")
    assert list(outcomes) == ["test_fails"]
    assert outcomes["test_fails"][0] == "failure"


def test_the_parent_stops_at_the_first_failure_when_asked(run_pytest):
    outcomes, _ = run_pytest(CASES, "test_cases.py", "-x")
    assert list(outcomes) == ["test_passes", "test_fails"]


def test_a_crash_of_the_child_fails_the_tests_that_did_not_finish(run_pytest):
    outcomes, _ = run_pytest(CRASH)
    assert outcomes["test_before"][0] == "passed"
    for name in ("test_crashes", "test_after"):
        outcome, text = outcomes[name]
        assert outcome == "failure"
        assert "status -9" in text
        assert "while it ran test_cases.py::test_crashes" in text
        assert "interpreter_tests.py" not in text


def test_a_file_that_the_child_cannot_import_fails_with_its_error(run_pytest):
    text = CRASH + "\nif os.environ.get('TRITON_INTERPRET'):\n    raise ImportError('no such thing')\n"
    outcomes, _ = run_pytest(text)
    assert {outcome for outcome, _ in outcomes.values()} == {"failure"}
    assert "ImportError: no such thing" in outcomes["test_before"][1]


IN_PLACE = """
import os

import pytest


@pytest.mark.interpreter
def test_process():
    assert os.getppid() == int(os.environ["GRANDPARENT"])
"""


def test_under_the_interpreter_the_tests_run_in_place(run_pytest):
    outcomes, _ = run_pytest(IN_PLACE, TRITON_INTERPRET="1", GRANDPARENT=str(os.getpid()))
    assert outcomes["test_process"][0] == "passed"
    outcomes, _ = run_pytest(IN_PLACE, GRANDPARENT=str(os.getpid()))
    assert outcomes["test_process"][0] == "failure", "without the variable there is a child between"
