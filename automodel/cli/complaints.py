"""Expected errors as messages on the terminal."""

import contextlib
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
    is_shared: bool = False,
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
        is_shared: Whether it is the error of all ranks, so that the message does not name this one.
        traceback_file: Where the traceback is to be found, if somewhere else.
        stream: Where it is printed; standard error by default. One that cannot be written (a closed terminal, a full
            disk) changes nothing.
    """
    with contextlib.suppress(OSError):
        _print_complaint(
            error,
            with_traceback=with_traceback,
            is_one_of_several=rank is not None,
            label="" if rank is None or is_shared else f"[rank {rank}] ",
            traceback_file=traceback_file,
            stream=stream or sys.stderr,
        )
    return status


def _print_complaint(
    error: BaseException,
    *,
    with_traceback: bool | None,
    is_one_of_several: bool,
    label: str,
    traceback_file: Path | None,
    stream: TextIO,
) -> None:
    if with_traceback and not is_one_of_several:
        traceback.print_exception(error, file=stream)
        return
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if not text or not isinstance(error, _TELLING):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    print(f"error: {label}{text}", file=stream)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=stream)
    if with_traceback:
        traceback.print_exception(error, file=stream)
    elif with_traceback is False and not isinstance(error, ValueError | OSError | ImportError | KeyboardInterrupt):
        hint = f"the traceback is in {traceback_file}" if traceback_file else _TRACEBACK_HINT
        print(f"  ({hint})", file=stream)
