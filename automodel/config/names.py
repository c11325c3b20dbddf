"""The nearest known name, for error messages about misspelt ones."""

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name nearest to `name`, or an empty string when none is near."""
    import difflib  # Only errors need it.

    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
