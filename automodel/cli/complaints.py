"""Expected errors as messages on the terminal."""

import sys
import traceback
from pathlib import Path
from typing import TextIO

__all__ = ["complain"]

_TRACEBACK_HINT = "--traceback shows where in the code it was raised"
_TELLING = (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, RuntimeError, KeyboardInterrupt)
"""The classes whose texts usually say enough; the name of any other class is printed with its text."""


def complain(
    error: BaseException,
    *,
    status: int,
    with_traceback: bool | None,
    rank: int | None = None,
    traceback_file: Path | None = None,
    stream: TextIO | None = None,
) -> int:
    """Print an expected error as a message, with the notes that say where in the recipe it belongs.

    Args:
        error: The error.
        status: The exit status, which is returned.
        with_traceback: Print the traceback instead (where several ranks run: too, after the message); None where the
            command has no option for that.
        rank: The rank of several that the error comes from.
        traceback_file: Where the traceback is, if it has been written somewhere.
        stream: Where it is printed; standard error by default.
    """
    stream = stream or sys.stderr
    if with_traceback and rank is None:
        traceback.print_exception(error, file=stream)
        return status
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if not text or not isinstance(error, _TELLING):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    print(f"error: {text}" if rank is None else f"error: [rank {rank}] {text}", file=stream)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=stream)
    if with_traceback:
        traceback.print_exception(error, file=stream)
    elif with_traceback is False and not isinstance(error, ValueError | OSError | ImportError | KeyboardInterrupt):
        hint = f"the traceback is in {traceback_file}" if traceback_file else _TRACEBACK_HINT
        print(f"  ({hint})", file=stream)
    return status
