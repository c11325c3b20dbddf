"""Environment placeholders in YAML strings, and the switches that the environment holds for this package."""

import os
import re
from collections.abc import Mapping

__all__ = ["has_placeholder", "interpolate", "resolve_yaml_env_vars", "user_modules_enabled"]

_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
_PLACEHOLDER = re.compile(
    rf"\$\{{(?:oc\.env:)?(?P<braced>{_NAME})(?:,(?P<default>[^}}]*))?\}}|\$(?P<plain>{_NAME})",
)


def has_placeholder(text: str) -> bool:
    """Say whether `text` holds an environment placeholder such as `${VAR}`, `${VAR,default}` or `$VAR`."""
    return _PLACEHOLDER.search(text) is not None


def interpolate(text: str) -> str:
    """Replace every environment placeholder in `text` by its value, once: values are not expanded again.

    Forms: `${VAR}`, `${VAR,default}` (the default begins after the first comma), `$VAR`, dots in names, and the
    older `${oc.env:VAR}` with the same default.

    Raises:
        KeyError: a variable is not set and its placeholder has no default; the message names the variable.
    """

    def substitute(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        value = os.environ.get(name)
        if value is not None:
            return value
        if match["default"] is not None:
            return match["default"]
        raise KeyError(f"environment variable {name!r} is not set and its placeholder has no default")

    return _PLACEHOLDER.sub(substitute, text)


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
