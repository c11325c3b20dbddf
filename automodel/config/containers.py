"""What the mappings and lists of a recipe have in common, and finding a value in them by its dotted path."""

from collections.abc import Hashable, Iterator, Mapping
from types import TracebackType
from typing import Any

from automodel.config.origins import Source
from automodel.config.redact import Secrecy, key_secrecy
from automodel.config.scalars import translate_value

__all__ = ["ABSENT", "Container", "Hiding", "find", "find_key", "secrecy_below"]

ABSENT: Any = object()
"""Stands for no value at all, where None is one."""

_MAX_DIGITS = 1000


class Container:
    """A mapping or list of a recipe, which knows what the recipe says for each of its values."""

    def entries(self) -> Iterator[tuple[Any, Any, Source]]:
        """Each key or position with its value, unresolved targets as they stand, and what the recipe says there."""
        raise NotImplementedError

    def values_by_key(self) -> Mapping[Any, Any]:
        """The values of a mapping; a target that was not resolved yet is given as it stands."""
        raise NotImplementedError

    def place_of(self, key: Any) -> str:
        """The dotted path of a key or position in the recipe."""
        raise NotImplementedError


class Hiding:
    """A context that keeps the secrets of the containers among `values` out of the errors that leave it."""

    def __init__(self, *values: Any) -> None:
        self._containers = [value for value in values if isinstance(value, Container)]

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Rewrite the error in place, or raise what stands for it."""
        if error is None:
            return
        from automodel.config.hiding import HiddenValues, hide_values  # Only errors need it.

        hidden = HiddenValues()
        for container in self._containers:
            hide_values(hidden, container)
        safe = hidden.hide_in(error)
        if safe is error:
            return
        context, suppressed = safe.__context__, safe.__suppress_context__
        try:
            raise safe
        finally:
            # Raising linked it to the error that it stands for.
            object.__setattr__(safe, "__context__", context)
            object.__setattr__(safe, "__suppress_context__", suppressed)


def find_key(container: object, part: Any) -> Any:
    """The key or position of `container` that one part of a dotted path means, or ABSENT.

    A key that is no string is found by the text that spells it, such as `5` or `true`.
    """
    match container:
        case list() | tuple():
            # Python refuses to read numbers of thousands of digits, which no position has.
            if isinstance(part, str) and part.isdecimal() and len(part) < _MAX_DIGITS and int(part) < len(container):
                return int(part)
            return part if type(part) is int and 0 <= part < len(container) else ABSENT
        case Container() | Mapping():
            keys: Mapping[Any, Any] = container.values_by_key() if isinstance(container, Container) else container
            if not isinstance(part, Hashable):
                return ABSENT
            if part in keys:
                return part
            if not isinstance(part, str):
                return ABSENT
            typed = translate_value(part)
            return next((k for k in keys if not isinstance(k, str) and _is_spelt(k, part, typed)), ABSENT)
        case _:
            return ABSENT


def find(container: object, path: Any) -> tuple[Any, Any] | None:
    """The innermost container and the key in it that a dotted path ends at, or None.

    A key that holds dots itself is found where it stands.
    """
    key = find_key(container, path)
    if key is not ABSENT:
        return container, key
    if not isinstance(path, str):
        return None
    head, dot, rest = path.partition(".")
    while dot:
        key = find_key(container, head)
        found = find(_raw(container, key), rest) if key is not ABSENT else None
        if found is not None:
            return found
        more, dot, rest = rest.partition(".")
        head = f"{head}.{more}"
    return None


def secrecy_below(secrecy: Secrecy, key: object) -> Secrecy:
    """What is hidden at a key of a mapping whose own key hides `secrecy`; the name of a callable is no secret."""
    return Secrecy.NONE if key == "_target_" else max(secrecy, key_secrecy(key))


def _is_spelt(key: object, part: str, typed: object) -> bool:
    return str(key) == part or (type(key) is type(typed) and key == typed)


def _raw(container: Any, key: Any) -> Any:
    is_node = isinstance(container, Container) and not isinstance(container, list)
    return container.values_by_key()[key] if is_node else container[key]
