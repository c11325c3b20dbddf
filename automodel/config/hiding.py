"""Keeping the secrets of a configuration out of the errors that its use raises."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from automodel.config.containers import Container, secrecy_below
from automodel.config.env import has_placeholder
from automodel.config.origins import Source
from automodel.config.printing import printable
from automodel.config.redact import REDACTED, Secrecy

__all__ = ["MIN_HIDDEN_CHARACTERS", "HiddenValues", "hide_values"]

MIN_HIDDEN_CHARACTERS = 4
"""Shorter values stand in many texts by chance, so that hiding them would garble messages and keep no secret."""

_NO_SECRETS = frozenset({"true", "false", "none", "null", "True", "False", "None"})
_MESSAGE = re.compile(r"(?P<place>\S+) must be .*, got (?P<value>.*)", re.DOTALL)
# What exceptions of the standard library print besides their args.
_TEXT_ATTRIBUTES = ("msg", "filename", "filename2", "strerror", "name", "path", "text", "reason", "code")


class HiddenValues:
    """Values that must not be printed, and what is printed instead."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._numbers: set[str] = set()
        self._places: dict[tuple[str, str], str] = {}

    def add(self, value: object, source: Source, *, place: str, shown: str, secrecy: Secrecy) -> None:
        """Hide one value of a recipe where it holds something from the environment or under a sensitive key.

        Args:
            value: The value in the configuration.
            source: What the recipe says.
            place: The dotted path of the value.
            shown: What is printed for it.
            secrecy: What its key says.
        """
        if not (source.holds_placeholder or secrecy):
            # A password in a URL makes the whole text a secret.
            if isinstance(value, str) and shown != value:
                self._hide_text(value, shown)
            return
        printed = repr(str(value)) if isinstance(value, str) else repr(value)
        if shown != str(value):
            self._places[place, printed] = repr(shown)
        if secrecy and not source.holds_placeholder and (isinstance(value, str) or secrecy is Secrecy.ALL):
            self._hide_leaves(value, REDACTED)
            self._hide_text(source.text or "", REDACTED)
        elif source.environment:
            self._hide_leaves(value, shown)
            self._hide_text(source.text or "", shown)
            for name, text in source.environment:
                self._hide_text(text, f"${{{name}}}")
            if place.endswith("_fn"):
                # The errors of an import name parts of the name.
                for part in re.split(r"[.:/]", str(value)):
                    self._hide_text(part, shown)
        elif secrecy:
            self._hide_leaves(value, shown)

    def hide(self, text: str) -> str:
        """Return `text` with every hidden value replaced."""
        message = _MESSAGE.fullmatch(text)
        if message is not None:
            shown = self._places.get((message["place"], message["value"]))
            if shown is not None:
                text = text[: message.start("value")] + shown
        if not self._shown:
            return text
        # What is shown already stays, so that hiding twice changes nothing.
        alternatives = [re.escape(shown) for shown in _longest_first({*self._shown.values()})] + [
            rf"(?<![\d.]){re.escape(needle)}(?!\d)" if needle in self._numbers else re.escape(needle)
            for needle in _longest_first(self._shown)
        ]
        return re.sub("|".join(alternatives), self._replacement, text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Rewrite the texts of an error, of its notes, and of those that it came from.

        Returns:
            The error itself, its class kept. An error whose text cannot be changed is replaced by one of a subclass.
        """
        if not self._shown and not self._places:
            return error
        self._rewrite(error, seen=set())
        text = str(error)
        if self.hide(text) == text:
            return error
        return _stand_in(error, self.hide(text))

    def _rewrite(self, error: BaseException, *, seen: set[int]) -> None:
        if id(error) in seen:
            return
        seen.add(id(error))
        _set_attribute(error, "args", tuple(self._hidden(item, seen=seen) for item in error.args))
        for name in (*_TEXT_ATTRIBUTES, *vars(error)):
            value = getattr(error, name, None)
            if isinstance(value, str | bytes | list | tuple | dict):
                hidden = self._hidden(value, seen=seen)
                if hidden != value:
                    _set_attribute(error, name, hidden)
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for linked in (error.__cause__, error.__context__, *inner):
            if linked is not None:
                self._rewrite(linked, seen=seen)

    def _hidden(self, value: object, *, seen: set[int]) -> object:
        """One argument of an error without hidden values; what holds none is returned as it is."""
        match value:
            case str():
                hidden = self.hide(value)
                return value if hidden == value else hidden
            case BaseException():
                self._rewrite(value, seen=seen)
                return value
            case list() | tuple() if type(value) in (list, tuple):
                items = [self._hidden(item, seen=seen) for item in value]
                return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
            case dict() if type(value) is dict:
                return {self._hidden(k, seen=seen): self._hidden(v, seen=seen) for k, v in value.items()}
            case _:
                text = repr(value)
                hidden = self.hide(text)
                return value if hidden == text else hidden

    def _replacement(self, match: re.Match[str]) -> str:
        found = match[0]
        return found if found in self._shown.values() else self._shown[found]

    def _hide_leaves(self, value: object, shown: str) -> None:
        match value:
            case None | bool():
                return
            case int() | float() | complex():
                for text in {str(value), repr(value), f"{value:,}"}:
                    self._hide_text(text, shown, number=True)
                if isinstance(value, float) and value.is_integer():
                    self._hide_text(str(int(value)), shown, number=True)
            case Mapping():
                for key, item in value.items():
                    self._hide_leaves(key, shown)
                    self._hide_leaves(item, shown)
            case list() | tuple() | set() | frozenset():
                for item in value:
                    self._hide_leaves(item, shown)
            case bytes():
                self._hide_text(value.decode("utf-8", errors="replace"), shown)
            case _:
                self._hide_text(str(value), shown)

    def _hide_text(self, text: str, shown: str, *, number: bool = False) -> None:
        text = text.strip()
        if text in _NO_SECRETS or (has_placeholder(text) and text == shown):
            return
        # The same text as repr, JSON and a URL write it.
        for spelt in (text, repr(str(text))[1:-1], json.dumps(text)[1:-1], quote(text, safe="", errors="replace")):
            if len(spelt) >= MIN_HIDDEN_CHARACTERS:
                self._shown.setdefault(spelt, shown)
                if number or spelt.isdecimal():
                    self._numbers.add(spelt)


def hide_values(hidden: HiddenValues, container: Container, secrecy: Secrecy = Secrecy.NONE) -> None:
    """Add what a container of a recipe must not show, at any depth, to `hidden`."""
    for key, value, source in container.entries():
        below = secrecy_below(secrecy, key)
        if isinstance(value, Container):
            hide_values(hidden, value, below)
        else:
            shown = printable(value, source, secrecy=below, spelling="placeholders", redact=True)
            hidden.add(value, source, place=container.place_of(key), shown=str(shown), secrecy=below)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _set_attribute(error: BaseException, name: str, value: object) -> None:
    try:
        setattr(error, name, value)
    except (AttributeError, TypeError):
        return


def _stand_in(error: BaseException, text: str) -> BaseException:
    """An error of a subclass that prints `text`, for one that builds its text from what cannot be changed."""
    cls = type(error)
    members = {
        "__str__": lambda _: text,
        "__repr__": lambda _: f"{cls.__name__}({text!r})",
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    made: BaseException
    try:
        subclass: Any = type(cls.__name__, (cls,), members)
        made = subclass.__new__(subclass)
    except (TypeError, ValueError):
        made = RuntimeError(text)
    for line in getattr(error, "__notes__", ()):
        made.add_note(line)
    return made.with_traceback(error.__traceback__)
