"""Progress of many bytes: live on a terminal, now and then elsewhere, and never in the way."""

import io

from automodel.observe.byte_progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def show(stream, seconds):
    clock = Clock()
    with ByteProgress(stream, "reading x", total=4_000_000_000, clock=clock) as progress:
        for now in seconds:
            clock.now = now
            progress.advance(1_000_000_000)
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then():
    assert show(io.StringIO(), [1, 10, 11, 21]).splitlines() == [
        "reading x: 50% of 4GB  200MB/s  10s left",
        "reading x: 100% of 4GB  190MB/s  0.00s left",
    ]


def test_a_terminal_gets_one_line_that_goes_away():
    text = show(Terminal(), [0.01, 1, 2])
    assert "\n" not in text
    assert [part for part in text.split("\r\x1b[2K") if part] == [
        "reading x: 50% of 4GB  2GB/s  1.0s left",
        "reading x: 75% of 4GB  1.5GB/s  0.67s left",
    ]
    assert text.endswith("\r\x1b[2K")


def test_the_total_may_show_late():
    stream, clock = io.StringIO(), Clock()
    with ByteProgress(stream, "writing x", clock=clock) as progress:
        progress.expect(4_000_000_000)
        clock.now = 10
        progress.advance(1_000_000_000)
    assert stream.getvalue() == "writing x: 25% of 4GB  100MB/s  30s left\n"


def test_short_tasks_show_nothing():
    assert show(io.StringIO(), [0.1, 0.2]) == ""
    assert show(Terminal(), [0.01, 0.02]) == ""


def test_a_stream_that_fails_is_given_up():
    stream = io.StringIO()
    clock = Clock()
    with ByteProgress(stream, "x", total=10, clock=clock) as progress:
        stream.close()
        clock.now = 20
        progress.advance(1)
        progress.advance(1)
    with ByteProgress(None, "x", total=0, clock=clock) as progress:
        clock.now = 40
        progress.advance(1)
