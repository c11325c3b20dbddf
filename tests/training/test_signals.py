import os
import signal
import subprocess
import sys
import threading

import pytest

from automodel.training.signals import StopSignals

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def handlers():
    """The handlers of the test process, restored in any case."""
    before = {number: signal.getsignal(number) for number in STOPS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_remembered_and_the_handlers_come_back(handlers, number):
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received is number
    assert {each: signal.getsignal(each) for each in STOPS} == handlers


def test_a_second_ctrl_c_interrupts_at_once(handlers):
    def press_twice():
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received is signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert {each: signal.getsignal(each) for each in STOPS} == handlers


def test_more_signals_of_a_scheduler_do_not_interrupt(handlers):
    with StopSignals() as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.received is signal.SIGTERM


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_that_was_ignored_stays_ignored(handlers, number):
    signal.signal(number, signal.SIG_IGN)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
        others = [other for other in STOPS if other is not number]
        os.kill(os.getpid(), others[0])
        assert signals.received is others[0]
    assert signal.getsignal(number) is signal.SIG_IGN


def test_the_handlers_come_back_after_an_error(handlers):
    with pytest.raises(ValueError, match="inside"), StopSignals():
        raise ValueError("inside")
    assert {each: signal.getsignal(each) for each in STOPS} == handlers


def test_outside_the_main_thread_nothing_happens(handlers):
    entered = []

    def enter():
        with StopSignals() as signals:
            entered.append((signals.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [(None, handlers[signal.SIGTERM])]


PROGRAM = """
import signal, sys
from automodel.training.signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while signals.received is None:
        signal.pause()
    print("saved after", signals.received.name, flush=True)
    if "wait" in sys.argv:
        while True:
            signal.pause()
signal.raise_signal(signal.SIGTERM)
"""


def start(*arguments):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", STOPS)
def test_a_process_goes_on_until_it_is_ready_to_stop(number):
    with start() as process:
        process.send_signal(number)
        assert process.stdout.read() == f"saved after {number.name}\n"
    # After the context the default handler of SIGTERM is back.
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_does_not_stop_can_be_interrupted():
    with start("wait") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "saved after SIGINT\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGINT
