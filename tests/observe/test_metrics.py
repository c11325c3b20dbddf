"""Metrics rows on disk: strict JSON, killed writers, full disks, rewinding."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from automodel.observe.metrics import (
    METRICS_VERSION,
    MetricsWriter,
    TrainingRow,
    ValidationRow,
    discard_rows_after,
    read_rows,
    set_aside,
    utc_timestamp,
)

ROW = TrainingRow(
    step=0,
    epoch=0,
    timestamp="2026-01-02T03:04:05.678+00:00",
    loss=8.25,
    grad_norm=1.5,
    lr=3e-4,
    mem=0.5,
    tps=7100.0,
    tps_per_gpu=7100.0,
    mfu=None,
    num_tokens_per_step=2048,
    num_label_tokens=2040,
    time_data=0.01,
    time_forward=0.1,
    time_backward=0.2,
    time_optimizer=0.02,
    time_step=0.35,
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def write_steps(path: Path, steps: range) -> None:
    with MetricsWriter(path) as writer:
        for step in steps:
            writer.append(dataclasses.replace(ROW, step=step))


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_come_back_with_the_reference_keys_and_a_version(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(3))
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0] == {"version": METRICS_VERSION, **dataclasses.asdict(ROW)}
    assert list(rows[0])[:13] == [
        *("version", "step", "epoch", "timestamp", "loss", "grad_norm", "lr", "mem", "tps", "tps_per_gpu", "mfu"),
        *("num_tokens_per_step", "num_label_tokens"),
    ]


def test_validation_rows(tmp_path):
    row = ValidationRow(
        step=-1,
        epoch=0,
        timestamp=utc_timestamp(),
        val_loss=8.3,
        lr=0.0,
        mem=0.1,
        tps=9e3,
        num_label_tokens=100_000,
        time_validation=4.5,
    )
    with MetricsWriter(tmp_path / "validation.jsonl") as writer:
        writer.append(row)
    assert read_rows(tmp_path / "validation.jsonl") == [{"version": METRICS_VERSION, **dataclasses.asdict(row)}]
    assert row.timestamp.endswith("+00:00")


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "training.jsonl"
    with MetricsWriter(path) as writer:
        writer.append(dataclasses.replace(ROW, loss=float("nan"), grad_norm=float("inf"), tps=float("-inf")))
    row = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert (row["loss"], row["grad_norm"], row["tps"]) == (None, None, None)


def test_the_file_is_made_by_the_first_row_and_readable_at_once(tmp_path):
    path = tmp_path / "run" / "training.jsonl"
    writer = MetricsWriter(path)
    assert not path.parent.exists()
    writer.append(ROW)
    assert steps_in(path) == [0]
    writer.close()


def test_a_writer_goes_on_where_an_earlier_one_stopped(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(2))
    write_steps(path, range(2, 4))
    assert steps_in(path) == [0, 1, 2, 3]


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
    assert discard_rows_after(tmp_path / "none.jsonl", 3) == 0
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(tmp_path, cut, caplog):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(3))
    content = path.read_bytes()
    line = content.splitlines(keepends=True)[-1]
    path.write_bytes(content[: len(content) - len(line) + cut])
    assert steps_in(path) == [0, 1]
    write_steps(path, range(2, 4))
    assert steps_in(path) == [0, 1, 2, 3]
    assert "torn" in caplog.text


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(2))
    path.write_bytes(path.read_bytes()[:-1])
    assert steps_in(path) == [0, 1]
    write_steps(path, range(2, 3))
    assert steps_in(path) == [0, 1, 2]


def test_a_killed_writer_leaves_every_row_it_appended(tmp_path):
    path = tmp_path / "training.jsonl"
    code = (
        "import dataclasses, os, signal, sys; from pathlib import Path\n"
        "from automodel.observe.metrics import MetricsWriter, ValidationRow\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "row = dict(epoch=0, timestamp='', val_loss=1.0, lr=0.0, mem=0.0, tps=0.0, num_label_tokens=1,"
        " time_validation=0.0)\n"
        "for step in range(5): writer.append(ValidationRow(step=step, **row))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert steps_in(path) == [0, 1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_refused_by_name(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text('{"step": 0}\n{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"training\.jsonl, line 2"):
        read_rows(path)


@pytest.mark.parametrize("version", [METRICS_VERSION + 1, "2"])
def test_a_newer_version_is_refused_by_name(tmp_path, version):
    path = tmp_path / "training.jsonl"
    path.write_text(json.dumps({"version": version, "step": 0}) + "\n")
    with pytest.raises(ValueError, match=rf"training\.jsonl, line 1.*{version}"):
        read_rows(path)
    with pytest.raises(ValueError, match="version"):
        discard_rows_after(path, 0)


def test_rows_of_the_reference_system_have_no_version(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text('{"step": 0, "loss": 2.0}\n')
    assert read_rows(path) == [{"step": 0, "loss": 2.0}]


def test_a_full_disk_is_one_warning_with_the_count(caplog):
    with caplog.at_level(logging.WARNING), MetricsWriter(Path("/dev/full")) as writer:
        for step in range(7):
            writer.append(dataclasses.replace(ROW, step=step))
        assert caplog.records == []
    assert len(caplog.records) == 1
    assert "7 metrics rows could not be written to /dev/full" in caplog.text


def test_a_path_that_cannot_be_opened_is_one_warning(tmp_path, caplog):
    with MetricsWriter(tmp_path) as writer:
        writer.append(ROW)
        writer.append(ROW)
    assert len(caplog.records) == 1
    assert "2 metrics rows" in caplog.text


def test_a_row_that_only_half_fits_is_dropped_whole(tmp_path):
    path = tmp_path / "training.jsonl"
    code = (
        "import resource, signal, sys, dataclasses, os; from pathlib import Path\n"
        "from automodel.observe.metrics import MetricsWriter, ValidationRow\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "row = dict(epoch=0, timestamp='', val_loss=1.0, lr=0.0, mem=0.0, tps=0.0, num_label_tokens=1,"
        " time_validation=0.0)\n"
        "path = Path(sys.argv[1])\n"
        "with MetricsWriter(path) as writer:\n"
        "    writer.append(ValidationRow(step=0, **row))\n"
        "    size = path.stat().st_size\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, resource.RLIM_INFINITY))\n"
        "    writer.append(ValidationRow(step=1, **row))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    writer.append(ValidationRow(step=2, **row))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert steps_in(path) == [0, 2]


def test_discarding_keeps_the_bytes_of_the_rows_up_to_the_step(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(6))
    path.chmod(0o640)
    first_four = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    with path.open("ab") as stream:
        stream.write(b'{"version": 1, "st')
    assert discard_rows_after(path, 3) == 2
    assert path.read_bytes() == first_four
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["training.jsonl"]
    write_steps(path, range(4, 6))
    assert steps_in(path) == [0, 1, 2, 3, 4, 5]


def test_discarding_drops_a_torn_line_alone(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"ver')
    assert discard_rows_after(path, 10) == 0
    assert path.read_bytes() == whole


def test_discarding_nothing_leaves_the_file_alone(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(2))
    before = path.stat()
    assert discard_rows_after(path, 1) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_discarding_everything_keeps_validation_before_training(tmp_path):
    path = tmp_path / "training.jsonl"
    write_steps(path, range(-1, 3))
    assert discard_rows_after(path, -1) == 3
    assert steps_in(path) == [-1]


def test_discarding_needs_steps(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text('{"loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"line 1: step must be a whole number, got None"):
        discard_rows_after(path, 0)
    assert path.read_text() == '{"loss": 1.0}\n'


def test_setting_aside_keeps_every_earlier_file(tmp_path):
    path = tmp_path / "training.jsonl"
    assert set_aside(path) is None
    for number in (1, 2):
        path.write_text(f"rows of run {number}")
        assert set_aside(path) == tmp_path / f"training.jsonl.{number}"
    assert not path.exists()
    assert [(tmp_path / f"training.jsonl.{number}").read_text() for number in (1, 2)] == [
        "rows of run 1",
        "rows of run 2",
    ]
