"""The values of a recipe as they may be printed and saved: placeholders kept, secrets redacted."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from automodel.config.containers import Container, secrecy_below
from automodel.config.origins import IN_CODE, EnvironmentString, Source
from automodel.config.redact import REDACTED, Secrecy, key_secrecy, redact_text, redact_written
from automodel.config.scalars import spell_value

__all__ = ["Spelling", "name_callable", "printable", "printable_keys", "resolved", "show"]

Spelling = Literal["written", "placeholders", "resolved"]

_NO_SOURCE = Source(origin=IN_CODE)


def printable(
    value: Any, source: Source = _NO_SOURCE, *, secrecy: Secrecy = Secrecy.NONE, spelling: Spelling, redact: bool
) -> Any:
    """A value of a recipe as plain dicts, lists and scalars that YAML and JSON can hold.

    Args:
        value: A container of a recipe or a value in one.
        source: What the recipe says for it.
        secrecy: What its key says.
        spelling: Which values are given as the strings that the recipe holds: all that are strings there
            ("written"), those with placeholders ("placeholders"), or none ("resolved").
        redact: Hide secrets.
    """
    if isinstance(value, Container):
        entries = list(value.entries())
        made = [
            printable(item, below, secrecy=secrecy_below(secrecy, key), spelling=spelling, redact=redact)
            for key, item, below in entries
        ]
        keys = printable_keys([key for key, _, _ in entries])
        return made if isinstance(value, list) else dict(zip(keys, made, strict=True))
    if not redact:
        secrecy = Secrecy.NONE
    if source.written is not None and (
        spelling == "written" or (spelling == "placeholders" and source.holds_placeholder)
    ):
        is_word = value is None or isinstance(value, bool)
        if not redact or (is_word and not source.holds_placeholder):
            return source.written
        if isinstance(value, Mapping | list | tuple) and not secrecy and not source.holds_placeholder:
            # The text of a mapping or list shows by its keys only what is secret in it.
            safe, plain = (_plain(value, secrecy, spelling=spelling, redact=hide) for hide in (True, False))
            return redact_written(source.written, secrecy) if safe == plain else safe
        return redact_written(source.written, secrecy)
    if redact and any(key_secrecy(name) for name in source.origin.variables):
        secrecy = Secrecy.ALL
    if secrecy is Secrecy.TEXT and source.text is not None:
        secrecy = Secrecy.ALL
    return _plain(name_callable(value, source), secrecy, spelling=spelling, redact=redact)


def name_callable(value: Any, source: Source | None) -> Any:
    """The name that the recipe uses for a callable that was resolved; every other value as it is."""
    return source.text if callable(value) and source is not None and source.text is not None else value


def resolved(value: Any) -> Any:
    """A value of a recipe as plain dicts, lists and resolved values, secrets included; callables as their names."""
    match value:
        case list() if isinstance(value, Container):
            return [resolved(name_callable(item, source)) for _, item, source in value.entries()]
        case Container():
            return {key: resolved(name_callable(item, source)) for key, item, source in value.entries()}
        case str():
            return str(value)
        case _:
            return value


def show(value: Any, source: Source, secrecy: Secrecy) -> str:
    """A value as a message may print it: its placeholder, `<redacted>`, or its repr."""
    shown = printable(value, source, secrecy=secrecy, spelling="placeholders", redact=True)
    return REDACTED if shown == REDACTED else repr(shown)


def _plain(value: Any, secrecy: Secrecy, *, spelling: Spelling, redact: bool) -> Any:
    match value:
        case None | bool():
            return value
        case Mapping():
            return {
                name: _plain(item, secrecy_below(secrecy, key) if redact else secrecy, spelling=spelling, redact=redact)
                for name, (key, item) in zip(printable_keys(list(value)), value.items(), strict=True)
            }
        case list() | tuple():
            return [_plain(item, secrecy, spelling=spelling, redact=redact) for item in value]
        case int() | float():
            return REDACTED if secrecy is Secrecy.ALL else value
        case EnvironmentString() if spelling != "resolved":
            written = value.source(IN_CODE).written or ""
            return redact_written(written, secrecy) if redact else written
        case str():
            text = str(value)
            if not redact:
                return spell_value(text) if spelling == "written" else text
            if secrecy:
                return REDACTED if text else text
            return redact_text(spell_value(text) if spelling == "written" else text)  # type: ignore[arg-type]
        case _ if callable(value):
            name = getattr(value, "__qualname__", None)
            return f"{value.__module__}.{name}" if name else str(value)
        case _:
            return REDACTED if secrecy else redact_text(str(value)) if redact else str(value)


def printable_keys(keys: Sequence[object]) -> list[Any]:
    """The keys of a mapping as YAML and JSON can hold them; of keys with the same text, all but one are spelt out."""
    made: dict[Any, None] = dict.fromkeys(key for key in keys if _is_plain_key(key))
    printed = []
    for key in keys:
        text: Any = key if _is_plain_key(key) else str(key)
        if text in made and not _is_plain_key(key):
            text = repr(key)
        made[text] = None
        printed.append(text)
    return printed


def _is_plain_key(key: object) -> bool:
    return key is None or isinstance(key, str | bool | int | float)
