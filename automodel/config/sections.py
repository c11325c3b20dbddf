"""Recipe sections as frozen dataclasses: one function builds them from a ConfigNode and refuses what they do not know.

A section class is a frozen, keyword-only dataclass beside its owner, and each of its fields is a `setting`. A
dataclass-typed field is a sub-section. `build_section` checks names and types, the class's `__post_init__` values.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from automodel.config.loader import ConfigNode, EnvironmentString
from automodel.config.names import did_you_mean

__all__ = ["NotAvailableYetError", "build_section", "check_arguments", "refuse", "setting"]

SectionT = TypeVar("SectionT")

_OFF = "off"


class NotAvailableYetError(ValueError):
    """A known section or key that is switched on but not built yet."""


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002 - the name that argparse uses
    *,
    factory: Callable[[], Any] | None = None,
    off: tuple[object, ...] | None = None,
) -> Any:
    """Declare a key of a section.

    Args:
        default: The value when the key is absent; a key without one is required.
        help: One line for people.
        factory: Makes the default instead.
        off: For a key that is known but not built yet: the values that leave it switched off.
    """
    metadata: dict[str, object] = {"help": help}
    if off is not None:
        metadata[_OFF] = off
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build_section(section_class: type[SectionT], node: ConfigNode | Mapping[Any, Any] | None, path: str) -> SectionT:
    """Build a section from the recipe's mapping; None and a missing mapping give the defaults.

    Args:
        section_class: A frozen dataclass whose fields are settings.
        node: The mapping; `_target_` is passed over where the class declares none.
        path: The section's place in the recipe, for messages.

    Raises:
        TypeError: the section is no mapping.
        ValueError: an unknown key (with the nearest known one), a missing or mistyped one, a refused value.
        NotAvailableYetError: a key that is switched on but not built yet.
    """
    if node is None:
        node = {}
    if not isinstance(node, ConfigNode | Mapping):
        raise TypeError(f"{path} must be a mapping, got {node!r}")
    fields = {field.name: field for field in dataclasses.fields(section_class)}  # type: ignore[arg-type]
    hints = get_type_hints(section_class)
    values: dict[str, Any] = {}
    for key in node:
        if key == "_target_" and key not in fields:
            continue
        if key not in fields:
            raise ValueError(f"unknown key {path}.{key}{did_you_mean(str(key), fields)}")
        values[key] = _checked(node[key], hints[key], f"{path}.{key}")
        off = fields[key].metadata.get(_OFF)
        if off is not None and not _is_one_of(values[key], off):
            raise NotAvailableYetError(f"{path}.{key}: {values[key]!r} is not available yet")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{path}.{name} is required")
    return section_class(**values)


def check_arguments(node: ConfigNode, *, provided: tuple[str, ...] = ()) -> None:
    """Check the keys of a `_target_` mapping, and of those nested in it, against the signatures of the targets.

    Args:
        node: The mapping.
        provided: Arguments that the caller passes itself, and so need not stand in the recipe.

    Raises:
        ValueError: a key that the target does not accept, or a required argument that is missing.
        ImportError, InvalidFileTargetError: the target cannot be resolved.
    """
    for key in node:
        _check_arguments_below(node[key])
    if "_target_" not in node:
        raise ValueError(f"{node.path} needs a _target_")
    target = node["_target_"]
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    target_name = getattr(target, "__qualname__", repr(target))
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in node:
        if key != "_target_" and key not in named and not takes_any:
            hint = did_you_mean(str(key), named)
            raise ValueError(f"unknown key {node.path}.{key}{hint}: {target_name} does not accept it")
    for name in sorted(named.difference(node, provided)):
        if parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"{node.path}.{name} is required by {target_name}")


def _check_arguments_below(value: object) -> None:
    """Check the `_target_` mappings at `value` and below it."""
    if isinstance(value, ConfigNode) and "_target_" in value:
        check_arguments(value)
    elif isinstance(value, ConfigNode):
        for key in value:
            _check_arguments_below(value[key])
    elif isinstance(value, list):
        for item in value:
            _check_arguments_below(item)


def refuse(path: str, value: object, expected: str) -> ValueError:
    """Make the error for a value that a section does not accept: `refuse("a.b", 0, "a positive integer")`."""
    return ValueError(f"{path} must be {expected}, got {value!r}")


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value is item or (type(value) is type(item) and value == item) for item in allowed)


def _checked(value: Any, hint: Any, path: str) -> Any:
    """Return `value` as the type that `hint` asks for, or raise the error that names the path."""
    if isinstance(value, EnvironmentString):
        value = str(value)
    if hint is Any or hint is object:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _checked_union(value, hint, path)
    if origin is Literal:
        if not _is_one_of(value, get_args(hint)):
            raise refuse(path, value, "one of " + ", ".join(repr(choice) for choice in get_args(hint)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise refuse(path, value, "a list")
        element = get_args(hint)[0]
        return tuple(_checked(item, element, f"{path}.{index}") for index, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return build_section(hint, value, path)  # type: ignore[arg-type]
    if hint is ConfigNode and not isinstance(value, ConfigNode):
        raise refuse(path, value, "a mapping")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise refuse(path, value, _TYPE_NAMES.get(hint, hint.__name__))
    return value


_TYPE_NAMES: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _checked_union(value: Any, hint: Any, path: str) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    errors: list[Exception] = []
    for choice in get_args(hint):
        if choice is type(None):
            continue
        try:
            return _checked(value, choice, path)
        except NotAvailableYetError:
            raise
        except (TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0]
