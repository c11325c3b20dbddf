"""Environment placeholders in YAML strings, and the switches that the environment holds for this package."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

__all__ = [
    "Expansion",
    "expand",
    "has_placeholder",
    "interpolate",
    "map_placeholders",
    "resolve_yaml_env_vars",
    "user_modules_enabled",
]

# A placeholder up to its comma or closing brace. It is compiled when it is first used, so that importing stays cheap.
_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
_HEAD = rf"\$(?:\{{(?:oc\.env:)?(?P<braced>{_NAME})(?=[,}}])|(?P<plain>{_NAME}))"


class _Placeholder(NamedTuple):
    """One placeholder of a text: where it stands, its variable, and where its default does, if it has one."""

    start: int
    end: int
    variable: str
    default: slice | None


class Expansion(NamedTuple):
    """A text whose placeholders were replaced.

    Attributes:
        text: The resulting text.
        environment: The variables that were found, with their values, in order.
        defaults: The variables that were not set, whose default was taken.
    """

    text: str
    environment: tuple[tuple[str, str], ...] = ()
    defaults: tuple[str, ...] = ()


def has_placeholder(text: str) -> bool:
    """Say whether `text` holds an environment placeholder such as `${VAR}`, `${VAR,default}` or `$VAR`."""
    return "$" in text and next(_find_placeholders(text), None) is not None


def expand(text: str) -> Expansion:
    """Replace every environment placeholder in `text` by its value, once: values are not expanded again.

    Forms: `${VAR}`, `${VAR,default}` (the default begins after the first comma), `$VAR`, dots in names, and the
    older `${oc.env:VAR}` with the same default.

    Raises:
        KeyError: a variable is not set and its placeholder has no default; the message names the variable.
    """
    made: list[str] = []
    found: list[tuple[str, str]] = []
    defaults: list[str] = []
    end = 0
    for placeholder in _find_placeholders(text):
        name = placeholder.variable
        value = os.environ.get(name)
        if value is not None:
            found.append((name, value))
        elif placeholder.default is not None:
            value = text[placeholder.default]
            defaults.append(name)
        else:
            raise KeyError(f"environment variable {name!r} is not set and its placeholder has no default")
        made += [text[end : placeholder.start], value]
        end = placeholder.end
    made.append(text[end:])
    return Expansion(text="".join(made), environment=tuple(found), defaults=tuple(dict.fromkeys(defaults)))


def interpolate(text: str) -> str:
    """Return `text` with every environment placeholder replaced (`expand`).

    Raises:
        KeyError: a variable is not set and its placeholder has no default; the message names the variable.
    """
    return expand(text).text


def map_placeholders(
    text: str, *, literal: Callable[[str], str], default: Callable[[str, str], str] = lambda name, default: default
) -> str:
    """Rewrite what stands around the placeholders of `text`, and the defaults in them.

    Args:
        text: The text as a recipe writes it.
        literal: Gives the new text of each stretch (never empty) outside the placeholders.
        default: Gives the new default of a placeholder from the name of its variable and its default.
    """
    made: list[str] = []
    end = 0
    for start, stop, variable, place in _find_placeholders(text):
        if start > end:
            made.append(literal(text[end:start]))
        if place is None:
            made.append(text[start:stop])
        else:
            made += [text[start : place.start], default(variable, text[place]), text[place.stop : stop]]
        end = stop
    if end < len(text):
        made.append(literal(text[end:]))
    return "".join(made)


def _find_placeholders(text: str) -> Iterator[_Placeholder]:
    """The placeholders of a text from left to right, in time that grows with its length only."""
    last_brace = text.rfind("}")
    end = 0
    for match in re.finditer(_HEAD, text):
        start, after = match.span()
        if start < end:
            continue
        if match["braced"] is None:
            end = after
            yield _Placeholder(start, end, match["plain"], None)
        elif text[after] == "}":
            end = after + 1
            yield _Placeholder(start, end, match["braced"], None)
        elif after < last_brace:
            close = text.index("}", after)
            end = close + 1
            yield _Placeholder(start, end, match["braced"], slice(after + 1, close))


def resolve_yaml_env_vars(value: object) -> object:
    """Interpolate every string inside nested mappings and lists; keys and `_target_` values are left alone.

    Raises:
        KeyError: a variable is missing and has no default.
    """
    match value:
        case str():
            return interpolate(value)
        case Mapping():
            return {k: v if k == "_target_" else resolve_yaml_env_vars(v) for k, v in value.items()}
        case list():
            return [resolve_yaml_env_vars(item) for item in value]
        case _:
            return value


def user_modules_enabled() -> bool:
    """Say whether NEMO_ENABLE_USER_MODULES allows private attributes in dotted targets."""
    return os.environ.get("NEMO_ENABLE_USER_MODULES", "").lower() in {"1", "true", "yes", "on"}
