"""Keeping the secrets of a configuration out of the errors that its use raises."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from automodel.config.containers import Container, secrecy_below
from automodel.config.env import has_placeholder
from automodel.config.origins import Source
from automodel.config.printing import printable
from automodel.config.redact import REDACTED, Secrecy, secret_parts

__all__ = ["MIN_HIDDEN_CHARACTERS", "HiddenValues", "hide_values"]

MIN_HIDDEN_CHARACTERS = 4
"""Shorter values stand in many texts by chance, so that hiding them would garble messages and keep no secret."""

# Errors by their ids: each with what stands for it, the error itself where it could be rewritten.
_Seen = dict[int, tuple[BaseException, BaseException]]

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
                for part in secret_parts(value):
                    self._hide_text(part, REDACTED)
                self._hide_text(value, shown)
            return
        if shown != str(value):
            for printed in _number_spellings(value) or (repr(str(value) if isinstance(value, str) else value),):
                self._places[place, printed] = repr(shown)
        if secrecy and not source.holds_placeholder and (isinstance(value, str) or secrecy is Secrecy.ALL):
            self._hide_leaves(value, REDACTED)
            self._hide_text(source.text or "", REDACTED)
        elif source.environment:
            self._hide_leaves(value, shown)
            self._hide_text(source.text or "", shown)
            for name, text in source.environment:
                self._hide_text(text, f"${{{name}}}")
            if place.endswith("_fn") or place in ("recipe", "recipe._target_"):
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
            The error itself, its class kept. An error whose text cannot be changed is replaced by one of a subclass, at
            any depth.
        """
        if not self._shown and not self._places:
            return error
        seen: _Seen = {}
        safe = self._safe(error, seen=seen)
        # Linking meets further errors: a loop, since a chain may be longer than recursion goes.
        linked = 0
        while linked < len(seen):
            pairs = list(seen.values())[linked:]
            linked += len(pairs)
            for original, replacement in pairs:
                self._link(original, replacement, seen=seen)
        return safe

    def _safe(self, error: BaseException, *, seen: _Seen) -> BaseException:
        """The error or its stand-in, its own texts, the errors in it and the members of a group rewritten."""
        if id(error) in seen:
            return seen[id(error)][1]
        seen[id(error)] = error, error
        with suppress(Exception):
            object.__setattr__(error, "args", tuple(self._hidden(item, seen=seen) for item in error.args))
        for name in (*_TEXT_ATTRIBUTES, *vars(error)):
            with suppress(Exception):
                value = getattr(error, name, None)
                if isinstance(value, str | bytes | list | tuple | dict):
                    hidden = self._hidden(value, seen=seen)
                    if hidden is not value:
                        object.__setattr__(error, name, hidden)
        safe = self._safe_group(error, seen=seen) if isinstance(error, BaseExceptionGroup) else error
        texts = _text(error, str), _text(error, repr)
        if safe is error and any(text is None or self.hide(text) != text for text in texts):
            safe = self._stand_in(error, seen=seen)
        seen[id(error)] = error, safe
        return safe

    def _link(self, error: BaseException, safe: BaseException, *, seen: _Seen) -> None:
        """Give an error or its stand-in the cause and the context of the error, both rewritten."""
        cause, context, suppressed = error.__cause__, error.__context__, error.__suppress_context__
        with suppress(Exception):
            object.__setattr__(safe, "__cause__", None if cause is None else self._safe(cause, seen=seen))
            object.__setattr__(safe, "__context__", None if context is None else self._safe(context, seen=seen))
            object.__setattr__(safe, "__suppress_context__", suppressed)

    def _safe_group(self, group: BaseExceptionGroup[Any], *, seen: _Seen) -> BaseException:
        """The group itself, or one of its class where its message or one of its members had to be replaced."""
        members = [self._safe(member, seen=seen) for member in group.exceptions]
        message = self.hide(group.message)
        kept = all(new is old for new, old in zip(members, group.exceptions, strict=True))
        return group if kept and message == group.message else self._stand_in(group, message, members, seen=seen)

    def _stand_in(self, error: BaseException, *arguments: object, seen: _Seen) -> BaseException:
        """An error of a subclass that prints safely, for one that builds its text from what cannot be changed.

        Args:
            error: The error.
            *arguments: What the class of Python that it derives from is made with.
            seen: The errors that were rewritten so far.
        """
        cls = type(error)
        text = self.hide(_text(error, str) or f"a {cls.__name__} that has no text")
        members = {
            "__str__": lambda _: text,
            "__repr__": lambda _: f"{cls.__name__}({text!r})",
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        base: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        subclass: Any = type(cls.__name__, (base,), members)
        with suppress(Exception):
            subclass = type(cls.__name__, (cls,), members)
        # The class of Python makes it, so that no code of the error's own class runs.
        made = base.__new__(subclass, *arguments)
        for name in ("args", "errno", *_TEXT_ATTRIBUTES, *vars(error)):
            with suppress(Exception):
                value = getattr(error, name)
                # An object that only the error's own class knows is left out: its text may come from there.
                if value is None or isinstance(value, str | bytes | int | float | list | tuple | dict):
                    object.__setattr__(made, name, self._hidden(value, seen=seen))
        return made.with_traceback(error.__traceback__)  # type: ignore[no-any-return]

    def _hidden(self, value: object, *, seen: _Seen, path: tuple[int, ...] = ()) -> object:
        """One argument of an error without hidden values; what holds none is returned as it is."""
        if id(value) in path:
            return "..."
        path = (*path, id(value))
        match value:
            case str():
                hidden = self.hide(value)
                return value if hidden == value else hidden
            case BaseException():
                return self._safe(value, seen=seen)
            case list() | tuple() if type(value) in (list, tuple):
                items = [self._hidden(item, seen=seen, path=path) for item in value]
                return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
            case dict() if type(value) is dict:
                pairs = [
                    (self._hidden(key, seen=seen, path=path), self._hidden(item, seen=seen, path=path))
                    for key, item in value.items()
                ]
                kept = all(k is key and v is item for (k, v), (key, item) in zip(pairs, value.items(), strict=True))
                return value if kept else dict(pairs)
            case _:
                spelt = _text(value, repr)
                shown = None if spelt is None else self.hide(spelt)
                return value if shown == spelt else shown

    def _replacement(self, match: re.Match[str]) -> str:
        found = match[0]
        return found if found in self._shown.values() else self._shown[found]

    def _hide_leaves(self, value: object, shown: str) -> None:
        match value:
            case None | bool():
                return
            case int() | float() | complex():
                for text in _number_spellings(value):
                    self._hide_text(text, shown, number=True)
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
        parts = [text] if number else [text, *text.splitlines(), *secret_parts(text)]
        for part in dict.fromkeys(part.strip() for part in parts):
            if part not in _NO_SECRETS and not (has_placeholder(part) and part == shown):
                self._hide_spellings(part, shown, number=number)

    def _hide_spellings(self, text: str, shown: str, *, number: bool) -> None:
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


def _number_spellings(value: object) -> tuple[str, ...]:
    """The texts of a number as it is, and as code writes it that took an integer for a float or back."""
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        return ()
    texts = [repr(value), f"{value:,}"]
    with suppress(OverflowError):
        if isinstance(value, int):
            texts.append(repr(float(value)))
        elif isinstance(value, float) and value.is_integer():
            texts += [str(int(value)), f"{int(value):,}"]
    return tuple(dict.fromkeys(texts))


def _text(value: object, spell: Callable[[object], str]) -> str | None:
    """The str or repr of a value; None for one that fails to give any, which may fail with a secret."""
    with suppress(Exception):
        return spell(value)
    return None
