"""Saying where in a recipe an error belongs, without wrapping the error."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["note"]


@contextmanager
def note(text: str) -> Iterator[None]:
    """Add a line to an exception that passes through; its class and its own text stay."""
    try:
        yield
    except Exception as error:
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
        raise
