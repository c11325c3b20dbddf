"""Saying where in a recipe an error belongs, without wrapping the error."""

from contextlib import suppress
from types import TracebackType

__all__ = ["Note", "add_note", "note"]


class Note:
    """What `note` returns."""

    def __init__(self, text: str) -> None:
        self._text = text

    # A context manager made from a generator would set the traceback, which an error that is frozen does not allow.
    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Add the line to an Exception."""
        if isinstance(error, Exception):
            add_note(error, self._text)


def note(text: str) -> Note:
    """A context that adds a line to an exception that passes through; its class and its own text stay."""
    return Note(text)


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an error, once. An error that allows no change stays as it is."""
    with suppress(Exception):
        notes = list(getattr(error, "__notes__", ()))
        if text not in notes:
            object.__setattr__(error, "__notes__", [*notes, text])
