"""Typed values from text: the translation that YAML strings, environment values and command-line overrides share."""

import ast
import warnings

__all__ = ["MAX_LITERAL_CHARACTERS", "translate_value"]

MAX_LITERAL_CHARACTERS = 1_000
"""Longer strings are never parsed as Python literals; they stay strings."""

_WORDS: dict[str, bool | None] = {
    "none": None,
    "None": None,
    "true": True,
    "True": True,
    "false": False,
    "False": False,
}


def translate_value(value: object) -> object:
    """Turn a string into the Python value that it spells; every other type is returned unchanged.

    `none`, `true` and `false` (also capitalised) become None, True and False; Python literals become their value
    (`"10"` -> 10, `"1e-5"` -> 1e-05, `"[1, 2]"` -> [1, 2]); everything else stays the string it was.
    """
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    if len(value) > MAX_LITERAL_CHARACTERS:
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
