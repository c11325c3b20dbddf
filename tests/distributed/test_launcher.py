"""The exit status of several ranks; that they start, stop and fail together is tested with the command."""

import signal

import pytest

from automodel.distributed.launcher import LaunchOutcome

KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("statuses", "stop", "expected"),
    [
        ((0, 0), None, 0),
        ((0, 0), signal.SIGTERM, 0),
        ((1, 2), None, 2),
        ((1, 1, 1), None, 1),
        ((130, 1), signal.SIGINT, 130),
        ((KILLED, 1), None, 1),
        ((KILLED, 0), None, 1),
        ((-signal.SIGTERM, -signal.SIGTERM), signal.SIGTERM, 143),
        ((KILLED, KILLED), signal.SIGINT, 130),
    ],
)
def test_the_status_of_a_job(statuses, stop, expected):
    assert LaunchOutcome(statuses=statuses, message=None, signal=stop).status == expected
