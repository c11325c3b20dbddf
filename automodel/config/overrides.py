"""Command-line overrides: `--a.b.c value`, `--a.b.c=value`, and `--flag` for true."""

from collections.abc import Sequence
from dataclasses import dataclass

from automodel.config.loader import ConfigNode
from automodel.config.scalars import spell_value, translate_value

__all__ = ["Override", "apply_overrides", "parse_overrides"]


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override: the dotted path and the typed value that replaces what the recipe says."""

    path: str
    value: object


def parse_overrides(tokens: Sequence[str]) -> list[Override]:
    """Read overrides from command-line words.

    Raises:
        ValueError: a word is no override and belongs to none.
    """
    overrides: list[Override] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name = token.removeprefix("--")
        if name == token or not name or name.startswith(("-", "=")):
            raise ValueError(f"unexpected argument {token!r}: an override is written --section.key value")
        path, equals, text = name.partition("=")
        if equals:
            value = _typed(text)
        elif rest and not rest[0].startswith("--"):
            value = _typed(rest.pop(0))
        else:
            value = True
        overrides.append(Override(path=path, value=value))
    return overrides


def apply_overrides(config: ConfigNode, overrides: Sequence[Override]) -> None:
    """Set each override in `config`, the later winning.

    Raises:
        ValueError: a path leads through a value that is no mapping or list.
    """
    for override in overrides:
        # Setting a value translates its strings; this one is translated already, and what was quoted stays a string.
        config.set_by_dotted(override.path, spell_value(override.value))


def _typed(text: str) -> object:
    if text in {"null", "~"}:
        return None
    return translate_value(text)
