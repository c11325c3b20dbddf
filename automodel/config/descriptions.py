"""The keys of a section in words for people: name, type, default and help, from the section's dataclass."""

import dataclasses
import inspect
import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from automodel.config.loader import ConfigNode
from automodel.config.scalars import translate_value
from automodel.config.sections import off_values

__all__ = ["SettingDescription", "describe_settings", "spell_type", "spell_yaml"]

_TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    type(None): "null",
    None: "null",
    Any: "anything",
    object: "anything",
    inspect.Parameter.empty: "anything",
    ConfigNode: "mapping",
}
_PLAIN_TEXT = re.compile(r"([^\W\d]|[/.$])[\w/.$@+-]*")
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingDescription:
    """One key of a section.

    Attributes:
        key: Its name; dotted where it stands in a sub-section.
        type: What it takes, in words.
        default: Its default; {} for a sub-section, whose keys have their own. None where the key is required.
        help: One line.
        required: Whether it has no default.
        available: The values that it may have while others are not available yet; None: any.
    """

    key: str
    type: str
    default: Any
    help: str
    required: bool = False
    available: tuple[object, ...] | None = None


def describe_settings(section_class: type[Any]) -> Iterator[SettingDescription]:
    """Describe every key of a section; those of a sub-section follow the sub-section's own."""
    hints = get_type_hints(section_class)
    for field in dataclasses.fields(section_class):
        hint = hints[field.name]
        default, required = _default(field)
        yield SettingDescription(
            key=field.name,
            type=spell_type(hint),
            default=default,
            help=field.metadata.get("help", ""),
            required=required,
            available=off_values(field),
        )
        if dataclasses.is_dataclass(hint):
            for inner in describe_settings(hint):  # type: ignore[arg-type]
                yield dataclasses.replace(inner, key=f"{field.name}.{inner.key}")


def spell_type(hint: Any) -> str:
    """A type in words: `int | None` is "integer or null", a Literal its choices."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(spell_type(choice) for choice in arguments))
    if origin is Literal:
        return " | ".join(spell_yaml(choice) for choice in arguments)
    if origin in (tuple, list):
        return f"list of {spell_type(arguments[0])}"
    if dataclasses.is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "mapping"
    return _TYPE_WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def spell_yaml(value: object) -> str:
    """A value on one line as a recipe would hold it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(spell_yaml, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{spell_yaml(key)}: {spell_yaml(item)}' for key, item in value.items())}}}"
        case str():
            plain = (
                _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_WORDS and translate_value(value) == value
            )
            return value if plain else json.dumps(value, ensure_ascii=False)
        case float() if not math.isfinite(value):
            return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
        case _:
            return str(value)


def _default(field: dataclasses.Field[Any]) -> tuple[Any, bool]:
    """The default of a field, and whether it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default, False
    if field.default_factory is dataclasses.MISSING:
        return None, True
    made = field.default_factory()
    return ({} if dataclasses.is_dataclass(made) else made), False
