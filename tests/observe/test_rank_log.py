"""The file of one rank's output."""

import os
import subprocess
import sys

SCRIPT = """
import logging, os, subprocess, sys
from pathlib import Path
from automodel.observe.rank_log import RankLog
logging.basicConfig(format="%(message)s")
print("before", flush=True)
with RankLog() as log:
    print("waits")
    logging.warning("a record")
    subprocess.run(["echo", "a child"], check=True)
    log.open(Path(sys.argv[1]) / "logs" / "rank_3.log", rank=3, world_size=4)
    print("at once")
    assert Path(log.path).read_text().endswith("at once\\n")
    os.write(2, b"a descriptor\\n")
    print("on the terminal", file=log.terminal)
print("after")
print("after, as an error", file=sys.stderr)
"""


def test_everything_goes_to_the_file_until_the_end(tmp_path):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == "before\nafter\n"
        assert done.stderr == "on the terminal\nafter, as an error\n"
    lines = (tmp_path / "logs" / "rank_3.log").read_text().splitlines()
    assert len(lines) == 12
    for header, *rest in (lines[:6], lines[6:]):
        assert header.startswith("--- 20")
        assert " rank 3 of 4, process " in header
        assert rest == ["waits", "a record", "a child", "at once", "a descriptor"]


def test_descriptors_are_given_back(tmp_path):
    code = (
        "import os\nfrom pathlib import Path\nfrom automodel.observe.rank_log import RankLog\n"
        "count = lambda: len(os.listdir('/dev/fd'))\nbefore = count()\n"
        "with RankLog() as log:\n    log.open(Path('x.log'), rank=1, world_size=2)\n"
        "assert count() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path, env={**os.environ})


def test_a_file_that_is_full_loses_what_is_printed_but_tells_what_is_written(tmp_path):
    code = (
        "import logging, os, resource, sys\nfrom pathlib import Path\nfrom automodel.observe.rank_log import RankLog\n"
        "logging.basicConfig(format='%(message)s')\n"
        "with RankLog() as log:\n"
        "    log.open(Path('x.log'), rank=1, world_size=2)\n"
        "    log.write('x' * 5000)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "    print('lost')\n"
        "    print('lost', file=sys.stderr)\n"
        "    logging.warning('lost')\n"
        "    try:\n"
        "        log.write('lost')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__, file=log.terminal)\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("after\n", "OSError\n")
    assert "lost" not in (tmp_path / "x.log").read_text()


def test_without_a_place_for_temporary_files_what_waits_is_lost(tmp_path):
    code = (
        "import tempfile\nfrom pathlib import Path\nfrom automodel.observe.rank_log import RankLog\n"
        "tempfile.tempdir = 'nowhere'\n"
        "with RankLog() as log:\n    print('lost')\n    log.open(Path('x.log'), rank=1, world_size=2)\n"
        "    print('kept')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "x.log").read_text().splitlines()[1:] == ["kept"]
