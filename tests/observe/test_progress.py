"""Progress on a real pseudo-terminal, in a pipe and in a file."""

import dataclasses
import fcntl
import io
import logging
import os
import re
import struct
import termios

import pytest

from automodel.observe.metrics import TrainingRow, ValidationRow
from automodel.observe.progress import Progress

ROW = TrainingRow(
    step=0,
    epoch=0,
    timestamp="",
    loss=8.25,
    grad_norm=1.5,
    lr=3e-4,
    mem=0.5,
    tps=7160.0,
    tps_per_gpu=7160.0,
    mfu=None,
    num_tokens_per_step=2048,
    num_label_tokens=2040,
    time_data=0.0,
    time_forward=0.0,
    time_backward=0.0,
    time_optimizer=0.0,
    time_step=0.0,
)
VALIDATION = ValidationRow(
    step=-1,
    epoch=0,
    timestamp="",
    val_loss=8.3,
    lr=0.0,
    mem=0.0,
    tps=0.0,
    num_label_tokens=100_352,
    time_validation=4.51,
)


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """A pseudo-terminal of some width, and what was written to it."""

    def __init__(self, columns: int) -> None:
        self.master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="ascii")

    def read(self) -> str:
        """Everything written since the last call; an end mark follows it, as a pty may deliver late and in pieces."""
        self.stream.write("\x04")
        self.stream.flush()
        text = ""
        while not text.endswith("\x04"):
            text += os.read(self.master, 1 << 16).decode("ascii")
        return text[:-1]

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def terminal():
    terminal = Terminal(120)
    yield terminal
    terminal.close()


def show(text: str) -> list[str]:
    """The lines a terminal shows after `text`: it knows carriage return, newline and erase-line."""
    lines = [""]
    for part in re.findall(r"\x1b\[2K|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] = part + lines[-1][len(part) :]
    return lines


def test_a_terminal_shows_one_live_line(terminal, clock):
    progress = Progress(terminal.stream, first_step=0, last_step=299, clock=clock)
    clock.now += 3.0
    progress.step(ROW)
    assert show(terminal.read()) == [
        "step   1/300    0%  loss 8.2500  lr 3e-4  7.16k tokens/s  3.0s elapsed  ? left",
    ]
    for step in range(1, 30):
        clock.now += 0.5
        progress.step(dataclasses.replace(ROW, step=step, loss=4.0))
    text = terminal.read()
    assert "\n" not in text
    # 29 steps took 14.5 s; the slow first one does not count: 270 steps left at 0.5 s.
    assert show(text) == ["step  30/300   10%  loss 4.0000  lr 3e-4  7.16k tokens/s  18s elapsed  2m15s left"]
    progress.close()
    assert show(terminal.read()) == [show(text)[0], ""]


def test_fast_steps_do_not_flood_the_terminal_and_the_last_one_is_drawn(terminal, clock):
    progress = Progress(terminal.stream, first_step=0, last_step=999, clock=clock)
    for step in range(1000):
        clock.now += 0.001
        progress.step(dataclasses.replace(ROW, step=step))
    text = terminal.read()
    assert text.count("\r") < 20
    assert show(text)[-1].startswith("step 1000/1000  100%")
    assert show(text)[-1].endswith("0.00s left")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (79, "step   2/300    0%  loss 8.2500  7.16k tokens/s  10s elapsed  24m50s left"),
        (61, "step   2/300    0%  loss 8.2500  7.16k tokens/s  24m50s left"),
        (45, "step   2/300    0%  loss 8.2500  24m50s left"),
        (10, "step   2/"),
    ],
)
def test_the_live_line_never_wraps(columns, line, clock):
    terminal = Terminal(columns)
    progress = Progress(terminal.stream, first_step=0, last_step=299, clock=clock)
    for step in range(2):
        clock.now += 5.0
        progress.step(dataclasses.replace(ROW, step=step))
    shown = show(terminal.read())
    terminal.close()
    assert shown == [line]
    assert len(line) < columns


def test_a_terminal_without_a_size_has_80_columns(clock):
    terminal = Terminal(0)
    progress = Progress(terminal.stream, first_step=0, last_step=9_999_999, clock=clock)
    progress.step(ROW)
    (line,) = show(terminal.read())
    terminal.close()
    assert 40 < len(line) < 80


def test_messages_and_validation_leave_the_live_line_below(terminal, clock):
    progress = Progress(terminal.stream, first_step=0, last_step=299, clock=clock)
    progress.validation(VALIDATION)
    progress.step(ROW)
    progress.message("saved a checkpoint")
    progress.validation(dataclasses.replace(VALIDATION, step=99, val_loss=None))
    shown = show(terminal.read())
    assert shown[:3] == [
        "validation before training: loss 8.3000  100k tokens in 4.5s",
        "saved a checkpoint",
        "validation at step 100/300: loss -  100k tokens in 4.5s",
    ]
    assert shown[3].startswith("step   1/300")
    assert len(shown) == 4


def test_the_log_of_a_terminal_goes_above_the_live_line(terminal, clock):
    handler = logging.StreamHandler(terminal.stream)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        progress = Progress(terminal.stream, first_step=0, last_step=299, clock=clock)
        with progress.log_through():
            progress.step(ROW)
            logging.getLogger("elsewhere").warning("the disk is nearly full")
        assert handler in root.handlers
    finally:
        root.removeHandler(handler)
    shown = show(terminal.read())
    assert shown[0] == "WARNING: the disk is nearly full"
    assert shown[1].startswith("step   1/300")
    assert len(shown) == 2


def test_messages_cannot_steer_the_terminal_or_break_its_encoding(terminal, clock):
    progress = Progress(terminal.stream, first_step=0, last_step=9, clock=clock)
    progress.message("a\x1b[2Jb\tc\nd \u00e9 \ud800")
    assert terminal.read() == "a\\x1b[2Jb\tc\nd \\xe9 \\ud800\n"


def test_a_pipe_gets_plain_lines_first_last_and_in_between(clock):
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        progress = Progress(stream, first_step=0, last_step=999, interval_seconds=10.0, clock=clock)
        for step in range(1000):
            clock.now += 0.01
            progress.step(dataclasses.replace(ROW, step=step))
        progress.close()
    with os.fdopen(read_end) as stream:
        text = stream.read()
    assert "\r" not in text
    assert "\x1b" not in text
    steps = [int(number) for number in re.findall(r"^step +(\d+)/1000", text, re.MULTILINE)]
    assert steps == [1, *range(50, 1001, 50)]


def test_slow_steps_get_a_line_after_each_interval(clock):
    stream = io.StringIO()
    progress = Progress(stream, first_step=0, last_step=99_999, interval_seconds=10.0, clock=clock)
    for step in range(100):
        clock.now += 1.0
        progress.step(dataclasses.replace(ROW, step=step))
    assert re.findall(r"^step +(\d+)/", stream.getvalue(), re.MULTILINE) == [str(n) for n in range(1, 100, 10)]


def test_a_resumed_run_counts_on(clock):
    stream = io.StringIO()
    progress = Progress(stream, first_step=20, last_step=29, interval_seconds=0.0, clock=clock)
    for step in range(20, 30):
        clock.now += 2.0
        progress.step(dataclasses.replace(ROW, step=step))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 21/30   70%")
    assert lines[1].endswith("16s left")
    assert lines[-1].startswith("step 30/30  100%")


def test_a_skipped_step_and_a_missing_loss_are_shown(clock):
    stream = io.StringIO()
    progress = Progress(stream, first_step=0, last_step=1, interval_seconds=0.0, clock=clock)
    progress.step(dataclasses.replace(ROW, skipped=True))
    progress.step(dataclasses.replace(ROW, step=1, loss=None))
    first, second = stream.getvalue().splitlines()
    assert "skipped" in first
    assert "loss -" in second


def test_closing_without_a_step_prints_nothing(terminal):
    progress = Progress(terminal.stream, first_step=20, last_step=19)
    progress.close()
    progress.message("too late")
    assert terminal.read() == ""


def test_a_broken_pipe_never_stops_a_step(clock):
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    progress = Progress(stream, first_step=0, last_step=9, interval_seconds=0.0, clock=clock)
    progress.step(ROW)
    progress.step(dataclasses.replace(ROW, step=1))
    progress.message("still here")
    progress.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_wrong_bounds_are_refused():
    with pytest.raises(ValueError, match="last_step must be at least first_step - 1 = 9, got 8"):
        Progress(io.StringIO(), first_step=10, last_step=8)
    with pytest.raises(ValueError, match=r"interval_seconds must not be negative, got -1\.0"):
        Progress(io.StringIO(), first_step=0, last_step=8, interval_seconds=-1.0)
