"""Environment placeholders in YAML strings, and the switches that the environment holds for this package."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = [
    "Expansion",
    "expand",
    "has_placeholder",
    "interpolate",
    "map_placeholders",
    "resolve_yaml_env_vars",
    "user_modules_enabled",
]

_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
_PLACEHOLDER = re.compile(
    rf"\$\{{(?:oc\.env:)?(?P<braced>{_NAME})(?:,(?P<default>[^}}]*))?\}}|\$(?P<plain>{_NAME})",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
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
    return "$" in text and _PLACEHOLDER.search(text) is not None


def expand(text: str) -> Expansion:
    """Replace every environment placeholder in `text` by its value, once: values are not expanded again.

    Forms: `${VAR}`, `${VAR,default}` (the default begins after the first comma), `$VAR`, dots in names, and the
    older `${oc.env:VAR}` with the same default.

    Raises:
        KeyError: a variable is not set and its placeholder has no default; the message names the variable.
    """
    found: list[tuple[str, str]] = []
    defaults: list[str] = []

    def substitute(match: re.Match[str]) -> str:
        name: str = match["braced"] or match["plain"]
        value = os.environ.get(name)
        if value is not None:
            found.append((name, value))
            return value
        default: str | None = match["default"]
        if default is None:
            raise KeyError(f"environment variable {name!r} is not set and its placeholder has no default")
        defaults.append(name)
        return default

    made = _PLACEHOLDER.sub(substitute, text)
    return Expansion(text=made, environment=tuple(found), defaults=tuple(dict.fromkeys(defaults)))


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
    for match in _PLACEHOLDER.finditer(text):
        if match.start() > end:
            made.append(literal(text[end : match.start()]))
        start, stop = match.span("default")
        if start < 0:
            made.append(match[0])
        else:
            made += [text[match.start() : start], default(match["braced"], match["default"]), text[stop : match.end()]]
        end = match.end()
    if end < len(text):
        made.append(literal(text[end:]))
    return "".join(made)


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
