"""Expected errors as messages on the terminal."""

import sys
import traceback

__all__ = ["complain"]

_TELLING = (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, RuntimeError, KeyboardInterrupt)
"""The classes whose texts usually say enough; the name of any other class is printed with its text."""


def complain(error: BaseException, *, status: int, with_traceback: bool | None) -> int:
    """Print an expected error as a message, with the notes that say where in the recipe it belongs.

    Args:
        error: The error.
        status: The exit status, which is returned.
        with_traceback: Print the traceback instead; None where the command has no option for that.
    """
    if with_traceback:
        traceback.print_exception(error)
        return status
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if not text or not isinstance(error, _TELLING):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    if with_traceback is False and not isinstance(error, ValueError | OSError | ImportError | KeyboardInterrupt):
        print("  (--traceback shows where in the code it was raised)", file=sys.stderr)
    return status
