"""Recipe sections as frozen dataclasses: one function builds them from a ConfigNode and refuses what they do not know.

A section class is a frozen, keyword-only dataclass beside its owner, and each of its fields is a `setting`. A
dataclass-typed field is a sub-section. `build_section` checks names and types, the class's `__post_init__` values.
"""

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from automodel.config.loader import ConfigNode, EnvironmentString
from automodel.config.names import did_you_mean
from automodel.config.notes import add_note
from automodel.config.origins import Origin

__all__ = ["NotAvailableYetError", "add_place", "build_section", "check_arguments", "off_values", "refuse", "setting"]

SectionT = TypeVar("SectionT")

_OFF = "off"
_SWITCHES = ("enabled", "enable")
_OVERRIDDEN = "in a command-line override"
_TYPE_NAMES: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


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


def off_values(field: dataclasses.Field[Any]) -> tuple[object, ...] | None:
    """The values that leave a setting switched off while it is not built yet; None for one that is built."""
    off: tuple[object, ...] | None = field.metadata.get(_OFF)
    return off


def build_section(
    section_class: type[SectionT],
    node: ConfigNode | Mapping[Any, Any] | None,
    path: str,
    *,
    also: type[Any] | None = None,
) -> SectionT:
    """Build a section from the recipe's mapping; None and a missing mapping give the defaults.

    In a section that its key `enabled` or `enable` switches off, settings that are not built yet may have any value.

    Args:
        section_class: A frozen dataclass whose fields are settings.
        node: The mapping; `_target_` is passed over where the class declares none.
        path: The section's place in the recipe, for messages.
        also: A second such class, whose keys are checked in the same way and then passed over.

    Raises:
        TypeError: the section is no mapping.
        ValueError: an unknown key (with the nearest known one), a missing or mistyped one, a refused value.
        NotAvailableYetError: a key that is switched on but not built yet.
    """
    if node is None:
        node = {}
    if not isinstance(node, ConfigNode | Mapping):
        raise TypeError(f"{path} must be a mapping, got {node!r}")
    with node.hiding_values() if isinstance(node, ConfigNode) else nullcontext(), _located(node, path):
        values = _checked_values(section_class, node, path, also=also)
        for field in dataclasses.fields(section_class):  # type: ignore[arg-type]
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in values:
                raise ValueError(f"{path}.{field.name} is required")
        return section_class(**values)


def _checked_values(
    section_class: type[Any], node: ConfigNode | Mapping[Any, Any], path: str, *, also: type[Any] | None
) -> dict[str, Any]:
    """The values that the mapping gives for the fields of the class."""
    fields, hints = _settings_of(section_class)
    more_fields, more_hints = _settings_of(also) if also is not None else ({}, {})
    switched_off = any(name in fields and node.get(name) is False for name in _SWITCHES)
    values: dict[str, Any] = {}
    for key in node:
        if key == "_target_" and key not in fields:
            continue
        field = fields.get(key) or more_fields.get(key)
        if field is None:
            raise ValueError(f"unknown key {path}.{key}{did_you_mean(str(key), {*fields, *more_fields})}")
        value = _checked(node, key, hints.get(key, more_hints.get(key)), f"{path}.{key}")
        off = off_values(field)
        if off is not None and not switched_off and not _is_one_of(value, off):
            raise NotAvailableYetError(f"{path}.{key}: {_shown(node, key)} is not available yet")
        if key in fields:
            values[key] = value
    return values


def _settings_of(section_class: type[Any]) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """The fields of a section class by name, and their types."""
    return {field.name: field for field in dataclasses.fields(section_class)}, get_type_hints(section_class)


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
        _check_arguments_below(node[key], key=key)
    if "_target_" not in node:
        raise ValueError(f"{node.path} needs a _target_")
    target = node["_target_"]
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    with _located(node, node.path):
        _check_against(parameters, node, provided=provided, target_name=getattr(target, "__qualname__", repr(target)))


def _check_against(
    parameters: Mapping[str, inspect.Parameter], node: ConfigNode, *, provided: tuple[str, ...], target_name: str
) -> None:
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


def _check_arguments_below(value: object, *, key: object = None) -> None:
    """Check the `_target_` mappings at `value`, which stands under `key`, and below it."""
    if isinstance(value, ConfigNode) and "_target_" in value:
        if isinstance(key, str) and key.endswith("_fn") and _lacks_arguments(value):
            raise NotAvailableYetError(
                f"{value.path}: a function with some of its arguments is not available yet; name the function alone"
            )
        check_arguments(value)
    elif isinstance(value, ConfigNode):
        for name in value:
            _check_arguments_below(value[name], key=name)
    elif isinstance(value, list):
        for item in value:
            _check_arguments_below(item)


def _lacks_arguments(node: ConfigNode) -> bool:
    """Whether the target of the mapping needs more arguments than the mapping gives."""
    try:
        inspect.signature(node["_target_"]).bind(**dict.fromkeys(key for key in node if key != "_target_"))
    except TypeError as error:
        return "missing" in str(error)
    except ValueError:
        return False
    return False


def refuse(path: str, value: object, expected: str) -> ValueError:
    """Make the error for a value that a section does not accept: `refuse("a.b", 0, "a positive integer")`."""
    return ValueError(f"{path} must be {expected}, got {value!r}")


def add_place(error: Exception, origin: Origin) -> None:
    """Note on an error where the recipe holds what it is about, unless a closer place was noted already."""
    notes = getattr(error, "__notes__", ())
    if origin.kind == "override" and _OVERRIDDEN not in notes:
        add_note(error, _OVERRIDDEN)
    elif origin.kind == "file" and not any(_OVERRIDDEN in text or f"{origin.file}:" in text for text in notes):
        add_note(error, f"in {origin.file}:{origin.line}")


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value is item or (type(value) is type(item) and value == item) for item in allowed)


class _Shown:
    """Stands in a message for a value that must not be printed as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(container: Any, key: Any) -> str:
    """A value as a message may print it: the recipe's placeholder instead of what the environment holds."""
    return str(container.shown(key)) if hasattr(container, "shown") else repr(container[key])


@contextmanager
def _located(node: ConfigNode | Mapping[Any, Any], path: str) -> Iterator[None]:
    """Add to an error that names a key of `node` where the recipe holds that key."""
    try:
        yield
    except (ValueError, TypeError) as error:
        named = re.search(rf"(?<![\w.]){re.escape(path)}\.([^\s.:]+)", str(error))
        if isinstance(node, ConfigNode) and named is not None and named[1] in node:
            add_place(error, node.origin(named[1]))
        raise


def _checked(container: Any, key: Any, hint: Any, path: str) -> Any:
    """Return the value at `key` as the type that `hint` asks for, or raise the error that names the path."""
    value = container[key]
    if isinstance(value, EnvironmentString):
        value = str(value)
    if hint is Any or hint is object:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _checked_union(container, key, hint, path)
    if origin is Literal:
        if not _is_one_of(value, get_args(hint)):
            raise _refused(container, key, path, str(_describe_hint(hint)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _refused(container, key, path, "a list")
        element = get_args(hint)[0]
        return tuple(_checked(value, index, element, f"{path}.{index}") for index in range(len(value)))
    if dataclasses.is_dataclass(hint):
        return build_section(hint, value, path)  # type: ignore[arg-type]
    if hint is ConfigNode and not isinstance(value, ConfigNode):
        raise _refused(container, key, path, "a mapping")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and not isinstance(value, str) and (text := _text(container, key)) is not None:
        return text
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _refused(container, key, path, _TYPE_NAMES.get(hint, hint.__name__))
    return value


def _text(container: Any, key: Any) -> str | None:
    """The string that the recipe holds where it was read as another type: `"2024"` is a text if one is asked for."""
    text: str | None = container.text(key) if hasattr(container, "text") else None
    return text


def _refused(container: Any, key: Any, path: str, expected: str) -> ValueError:
    return refuse(path, _Shown(_shown(container, key)), expected)


def _checked_union(container: Any, key: Any, hint: Any, path: str) -> Any:
    value = container[key]
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if value is None and len(choices) < len(get_args(hint)):
        return None
    if isinstance(value, ConfigNode | Mapping):
        # What is wrong inside a mapping says more than that it is none of the other types.
        choices = [choice for choice in choices if dataclasses.is_dataclass(choice)] or choices
    errors: list[Exception] = []
    for choice in choices:
        try:
            return _checked(container, key, choice, path)
        except NotAvailableYetError:
            raise
        except (TypeError, ValueError) as error:
            errors.append(error)
    expected = {choice: _describe_hint(choice) for choice in choices}
    if len(errors) == 1 or None in expected.values():
        raise errors[0]
    raise _refused(container, key, path, ", or ".join(text for text in expected.values() if text is not None))


def _describe_hint(hint: Any) -> str | None:
    """What a value of a type looks like, for a message; None where only its own check can tell."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if dataclasses.is_dataclass(hint) or hint is ConfigNode:
        return "a mapping"
    return _TYPE_NAMES.get(hint)
