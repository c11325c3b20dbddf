"""Standard output whose reader may leave before the end (`| head`): that is no failure of what runs."""

import os
import sys

__all__ = ["say", "silence_stdout"]


def say(text: str) -> None:
    """Print a line now; when nobody reads any more, this line and the later ones go nowhere."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Send everything that is still to be printed, buffered text included, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
