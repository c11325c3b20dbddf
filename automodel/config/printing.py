"""The values of a recipe as they may be printed and saved: placeholders kept, secrets redacted."""

from collections.abc import Mapping
from typing import Any, Literal

from automodel.config.containers import Container, secrecy_below
from automodel.config.origins import IN_CODE, Source
from automodel.config.redact import REDACTED, Secrecy, key_secrecy, redact_text, redact_written
from automodel.config.scalars import spell_value

__all__ = ["Spelling", "name_callable", "printable", "resolved", "show"]

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
        made = {
            _printable_key(key): printable(
                item, below, secrecy=secrecy_below(secrecy, key), spelling=spelling, redact=redact
            )
            for key, item, below in value.entries()
        }
        return list(made.values()) if isinstance(value, list) else made
    if not redact:
        secrecy = Secrecy.NONE
    if source.written is not None and (
        spelling == "written" or (spelling == "placeholders" and source.holds_placeholder)
    ):
        is_word = value is None or isinstance(value, bool)
        if not redact or (is_word and not source.holds_placeholder):
            return source.written
        return redact_written(source.written, secrecy)
    if redact and any(key_secrecy(name) for name in source.origin.variables):
        secrecy = Secrecy.ALL
    if secrecy is Secrecy.TEXT and source.text is not None:
        secrecy = Secrecy.ALL
    return _plain(name_callable(value, source), secrecy, written=spelling == "written", redact=redact)


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


def _plain(value: Any, secrecy: Secrecy, *, written: bool, redact: bool) -> Any:
    match value:
        case None | bool():
            return value
        case Mapping():
            return {
                _printable_key(key): _plain(
                    item, secrecy_below(secrecy, key) if redact else Secrecy.NONE, written=written, redact=redact
                )
                for key, item in value.items()
            }
        case list() | tuple():
            return [_plain(item, secrecy, written=written, redact=redact) for item in value]
        case int() | float():
            return REDACTED if secrecy is Secrecy.ALL else value
        case str():
            text = str(value)
            if not redact:
                return spell_value(text) if written else text
            if secrecy:
                return REDACTED if text else text
            return redact_text(spell_value(text) if written else text)  # type: ignore[arg-type]
        case _ if callable(value):
            name = getattr(value, "__qualname__", None)
            return f"{value.__module__}.{name}" if name else str(value)
        case _:
            return REDACTED if secrecy else redact_text(str(value)) if redact else str(value)


def _printable_key(key: object) -> Any:
    return key if key is None or isinstance(key, str | bool | int | float) else str(key)
