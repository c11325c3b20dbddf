"""Command-line overrides: `--a.b.c value`, `--a.b.c=value`, and `--flag` for true."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automodel.config.loader import ConfigNode
from automodel.config.origins import Origin
from automodel.config.scalars import spell_value, translate_value

__all__ = ["Override", "apply_overrides", "parse_overrides"]


_OVERRIDE = Origin(kind="override")
_PATH_AND_VALUE = re.compile(r"[\w-]+(\.[\w-]+)+=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override.

    Attributes:
        path: The dotted path.
        value: The typed value that replaces what the recipe says.
        text: The word on the command line that the value was read from; None for a bare flag.
    """

    path: str
    value: object
    text: str | None = field(default=None, compare=False)


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
            raise _unexpected(token)
        path, equals, after = name.partition("=")
        text: str | None = after if equals else None
        if text is None and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        overrides.append(Override(path=path, value=True if text is None else _typed(text), text=text))
    return overrides


def apply_overrides(config: ConfigNode, overrides: Sequence[Override]) -> None:
    """Set each override in `config`, the later winning.

    Raises:
        ValueError: a path leads through a value that is no mapping or list.
    """
    for override in overrides:
        config.set_by_dotted(override.path, _as_recipe(override), origin=_OVERRIDE)


def _unexpected(token: str) -> ValueError:
    """The error for a word that is no override; one that only lacks its dashes is spelt right in it."""
    bare = token.lstrip("-")
    right = f"--{bare}" if _PATH_AND_VALUE.fullmatch(bare) else "--section.key value"
    return ValueError(f"unexpected argument {token!r}: an override is written {right}")


def _as_recipe(override: Override) -> object:
    """What a recipe would hold for the value: setting it translates its strings once more."""
    if override.text is None or override.value is None or isinstance(override.value, list | tuple | Mapping):
        return spell_value(override.value)
    return override.text


def _typed(text: str) -> object:
    if text in {"null", "~"}:
        return None
    return translate_value(text)
