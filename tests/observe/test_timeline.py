"""Start-up phases and the phases of a step."""

import time

import pytest

from automodel.observe.timeline import Phase, PhaseClock, Timeline


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_timeline_records_phases_in_order():
    clock = ManualClock()
    timeline = Timeline(started=97.5, clock=clock)
    with timeline.phase("model"):
        clock.now += 2.0
    with timeline.phase("data"):
        clock.now += 0.5
    assert timeline.phases == (Phase("imports", 2.5), Phase("model", 2.0), Phase("data", 0.5))
    assert timeline.total == 5.0


def test_without_a_start_there_is_no_imports_phase():
    assert Timeline().phases == ()
    assert Timeline().total == 0.0


def test_the_default_clock_is_monotonic_time():
    timeline = Timeline(started=time.monotonic())
    with timeline.phase("model"):
        pass
    assert all(0.0 <= phase.seconds < 60.0 for phase in timeline.phases)


@pytest.mark.parametrize("kind", [Timeline, PhaseClock])
def test_phases_do_not_nest_and_the_outer_one_goes_on(kind):
    clock = ManualClock()
    timer = kind(clock=clock)
    with timer.phase("outer"):
        with pytest.raises(RuntimeError, match="'inner' was opened inside phase 'outer'"), timer.phase("inner"):
            pass
        clock.now += 1.0
    seconds = timer.take() if kind is PhaseClock else {phase.name: phase.seconds for phase in timer.phases}
    assert seconds == {"outer": 1.0}


@pytest.mark.parametrize("kind", [Timeline, PhaseClock])
def test_a_phase_that_raises_is_recorded_and_closed(kind):
    clock = ManualClock()
    timer = kind(clock=clock)

    def fail() -> None:
        clock.now += 3.0
        raise KeyError("gone")

    with pytest.raises(KeyError), timer.phase("model"):
        fail()
    with timer.phase("next"):
        pass
    seconds = timer.take() if kind is PhaseClock else {phase.name: phase.seconds for phase in timer.phases}
    assert seconds == {"model": 3.0, "next": 0.0}


def test_a_phase_clock_sums_and_forgets():
    clock = ManualClock()
    timer = PhaseClock(clock=clock)
    for _ in range(3):
        with timer.phase("forward"):
            clock.now += 1.0
        with timer.phase("backward"):
            clock.now += 2.0
    assert timer.take() == {"forward": 3.0, "backward": 6.0}
    assert timer.take() == {}


def test_taking_while_a_phase_is_open_is_refused():
    timer = PhaseClock()
    with timer.phase("forward"), pytest.raises(RuntimeError, match="'forward' is still open"):
        timer.take()
