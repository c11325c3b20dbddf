"""Typed values from text: the translation that YAML strings, environment values and command-line overrides share."""

import warnings
from collections.abc import Mapping

__all__ = ["MAX_LITERAL_CHARACTERS", "spell_value", "translate_value"]

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


_MAY_BE_LITERAL = frozenset({"'", '"', "True", "Fals", "None", "set("})
"""What a literal that begins with a letter holds or begins with."""


def translate_value(value: object) -> object:
    """Turn a string into the Python value that it spells; every other type is returned unchanged.

    `none`, `true` and `false` (also capitalised) become None, True and False; Python literals become their value
    (`"10"` -> 10, `"1e-5"` -> 1e-05, `"[1, 2]"` -> [1, 2]); everything else, `"..."` too, stays the string
    it was.
    """
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    if len(value) > MAX_LITERAL_CHARACTERS:
        return value
    if value[:1].isalpha() and not _MAY_BE_LITERAL.intersection((value[:4], *value)):
        return value
    import ast  # Recipes of plain words have no need of it.

    try:
        with warnings.catch_warnings():
            # Strange escapes and the like: a DeprecationWarning in Python 3.11, a SyntaxWarning later.
            warnings.simplefilter("ignore")
            literal: object = ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
    return value if literal is Ellipsis else literal


def spell_value(value: object) -> object:
    """Return what a recipe must hold for `translate_value` to give `value`: the string `10` is spelt `'10'`, in quotes.

    Strings inside lists and mappings are spelt too; every other value spells itself.
    """
    match value:
        case str():
            translated = translate_value(value)
            return value if isinstance(translated, str) and translated == value else repr(str(value))
        case list():
            return [spell_value(item) for item in value]
        case Mapping():
            return {key: spell_value(item) for key, item in value.items()}
        case _:
            return value
