"""ConfigNode: a recipe as nested nodes with typed scalars, resolvable targets and placeholders that print safely."""

import copy
import re
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping
from typing import Any

import yaml

from automodel.config.containers import ABSENT, Container, Hiding, find, find_key
from automodel.config.env import expand, has_placeholder
from automodel.config.names import did_you_mean
from automodel.config.notes import Note, note
from automodel.config.origins import IN_CODE, EnvironmentString, Origin, Source, in_file
from automodel.config.printing import Spelling, name_callable, printable, resolved, show
from automodel.config.redact import Secrecy, key_secrecy
from automodel.config.scalars import translate_value
from automodel.config.targets import resolve_target
from automodel.config.yaml_file import MAX_DEPTH, LocatedList, LocatedMapping

__all__ = ["ConfigList", "ConfigNode", "EnvironmentString"]

_INTERNAL = frozenset({"_values", "_sources", "_path"})


class ConfigNode(Container):
    """One mapping of a recipe, with attribute and item access.

    Values: nested mappings are ConfigNodes, lists are ConfigLists, strings are translated (`translate_value`) after
    their placeholders were resolved. `_target_` and keys that end in `_fn` give the callable they name, resolved at
    first access. A key that is named like a method is reachable by `[]` and `get` only.

    Args:
        raw: The mapping as YAML gives it; it is copied.
        path: The dotted place of this node in its recipe, for error messages; "" at the top.
        origin: Where the values come from, for a mapping that does not know it itself.
    """

    def __init__(self, raw: Mapping[Any, Any] | None = None, *, path: str = "", origin: Origin = IN_CODE) -> None:
        self._path = path
        self._values: dict[Any, Any] = {}
        self._sources: dict[Any, Source] = {}
        lines = raw.lines if isinstance(raw, LocatedMapping) else {}
        for key, value in (raw or {}).items():
            if key in lines and isinstance(raw, LocatedMapping):
                origin = Origin(kind="file", file=raw.file, line=lines[key])
            self._set(key, value, origin=origin)

    @property
    def raw_config(self) -> dict[Any, Any]:
        """The mapping as the recipe writes it: strings untranslated, placeholders unresolved, targets as names."""
        written: dict[Any, Any] = printable(self, spelling="written", redact=False)
        return written

    @property
    def path(self) -> str:
        """The dotted place of this node in its recipe; "" at the top."""
        return self._path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _INTERNAL:
            raise AttributeError(name)
        if name in self._values:
            return self[name]
        known = [key for key in self._values if isinstance(key, str)]
        raise AttributeError(f"the configuration has no {self.place_of(name)!r}{did_you_mean(name, known)}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in _INTERNAL:
            object.__setattr__(self, name, value)
        else:
            self._set(name, value)

    def __getitem__(self, key: Any) -> Any:
        value = self._values[key]
        if _names_callable(key) and not callable(value) and (key == "_target_" or isinstance(value, str)):
            written, place = self._sources[key].written or value, in_file(self._sources[key])
            with self.hiding_values(), note(f"while resolving {self.place_of(key)}: {written}{place}"):
                value = resolve_target(str(value) if isinstance(value, str) else value)
            self._values[key] = value
        return value

    def __setitem__(self, key: Any, value: object) -> None:
        self._set(key, value)

    def __contains__(self, key: object) -> bool:
        return find(self, key) is not None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        """Two nodes are equal when their resolved values are, callables compared by name."""
        return isinstance(other, ConfigNode) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConfigNode":
        return self._moved_to(self._path)

    # Values travel as they are: a placeholder is resolved once, not again where the node is copied to. Callables
    # travel as their names, since the module of a file target exists in this process only.
    def __getstate__(self) -> dict[str, Any]:
        values = {key: name_callable(value, self._sources[key]) for key, value in self._values.items()}
        return {"path": self._path, "values": values, "sources": dict(self._sources)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._values, self._sources = state["path"], state["values"], state["sources"]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        text: str = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True)
        return text

    def entries(self) -> Iterator[tuple[Any, Any, Source]]:
        """Each key with its value, unresolved targets as they stand, and what the recipe says there."""
        for key, value in self._values.items():
            yield key, value, self._sources[key]

    def values_by_key(self) -> Mapping[Any, Any]:
        """The values by their keys, unresolved targets as they stand."""
        return self._values

    def place_of(self, key: Any) -> str:
        """The dotted path of a key in the recipe."""
        return f"{self._path}.{key}" if self._path else str(key)

    def items(self) -> ItemsView[Any, Any]:
        """The keys and values of this node; callables are given as the recipe names them until they are accessed."""
        return _Items(self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value at a key or dotted path (`"model.config.n_layer"`, `"list.0"`, `"ids.5"`), or `default`."""
        found = find(self, key)
        if found is None:
            return default
        container, last = found
        return container[last]

    def set_by_dotted(self, dotted: str, value: object, *, origin: Origin = IN_CODE) -> None:
        """Set the value at a dotted path, making the mappings on the way; an integer part indexes a list.

        Raises:
            ValueError: the path leads through a value that is no mapping or list, or past the end of a list; the
                configuration is unchanged.
            KeyError: the value holds a placeholder of a variable that is not set.
        """
        parts = dotted.split(".")
        if not all(parts):
            raise ValueError(f"{dotted!r} is not a dotted path")
        if len(parts) > MAX_DEPTH:
            raise ValueError(f"cannot set a path of {len(parts)} parts, the limit is {MAX_DEPTH}")
        node, keys = self._deepest(dotted, parts)
        made, source = _wrap(value, path=self.place_of(dotted), origin=origin, is_target=parts[-1] == "_target_")
        for key in keys[:-1]:
            below = ConfigNode(path=node.place_of(key))
            node._put(_new_key(node, key), below, Source(origin=origin))
            node = below
        node._put(_new_key(node, keys[-1]), made, source)

    def get_as_string(self, key: str, default: str | None = None) -> str | None:
        """Return the value at a dotted path as its text, or `default` where there is none."""
        value = self.get(key)
        return default if value is None else str(value)

    def origin(self, dotted: Any) -> Origin:
        """Say where the value at a key or dotted path comes from.

        Raises:
            KeyError: nothing stands there.
        """
        found = find(self, dotted)
        if found is None:
            raise KeyError(f"the configuration has no {self.place_of(dotted)!r}")
        container, key = found
        return container._source(key).origin if isinstance(container, ConfigNode | ConfigList) else IN_CODE

    def text(self, key: Any) -> str | None:
        """The string that the recipe holds at a key, placeholders resolved and not yet translated: `"2024"` for 2024.

        Returns:
            None where YAML or code gave another type than a string.
        """
        return self._sources[key].text

    def shown(self, key: Any) -> str:
        """The value at a key as a message may print it: its placeholder, `<redacted>`, or its repr."""
        return show(self._values[key], self._sources[key], key_secrecy(key))

    def hiding_values(self, *others: Any) -> Hiding:
        """A context that keeps the secrets of this node and below, and of `others`, out of the errors that leave it.

        Values from the environment and under sensitive keys are replaced by their placeholders and by `<redacted>` in
        the texts of the error, its notes, causes and contexts, where they are long enough to be told from other text.
        """
        return Hiding(self, *others)

    def instantiate(self, *args: Any, **overrides: Any) -> Any:
        """Call the node's `_target_` with its other keys as keyword arguments, nested targets first.

        Args:
            *args: Positional arguments that go before the keywords.
            **overrides: Keyword arguments that win over the recipe's.

        Raises:
            AttributeError: the node has no `_target_`.
            ImportError, InvalidFileTargetError: the target cannot be resolved.
        """
        if "_target_" not in self._values:
            raise AttributeError(f"{self._path or 'the configuration'!r} has no _target_ to instantiate")
        target: Callable[..., Any] = self["_target_"]
        arguments = self.arguments(without=overrides) | overrides
        with self.hiding_values(*args, *overrides.values()), self.note_instantiation():
            return target(*args, **arguments)

    def instantiate_path(self, dotted: str, default: Any = None, *args: Any, **overrides: Any) -> Any:
        """Instantiate the node at a dotted path; return `default` where there is none.

        Raises:
            AttributeError: what stands there is no mapping, or has no `_target_`.
        """
        node = self.get(dotted)
        if node is None:
            return default
        if not isinstance(node, ConfigNode):
            raise AttributeError(f"{self.place_of(dotted)!r} has no _target_ to instantiate: it is not a mapping")
        return node.instantiate(*args, **overrides)

    def arguments(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The keyword arguments that `instantiate` passes: every key but `_target_`, nested targets instantiated.

        Args:
            without: Keys to leave out, whose targets are then not called either.
        """
        return {key: _argument(self[key]) for key in self._values if key != "_target_" and key not in without}

    def note_instantiation(self) -> Note:
        """A context that adds this node's place and target to the errors of a call made on its behalf."""
        target = name_callable(self._values.get("_target_"), self._sources.get("_target_"))
        place = in_file(self._sources.get("_target_"))
        return note(f"while instantiating {self._path or '<top>'} (_target_: {target}){place}")

    def resolve_targets(self) -> None:
        """Resolve every `_target_` and `*_fn` of this node and below now, so that a bad name fails early.

        Raises:
            ImportError, InvalidFileTargetError: a name cannot be resolved; a note says where it stands.
        """
        for key in list(self._values):
            _resolve_below(self[key])

    def to_dict(self) -> dict[Any, Any]:
        """The plain resolved values, secrets included; callables as the names that the recipe uses."""
        values: dict[Any, Any] = resolved(self)
        return values

    def to_yaml_dict(
        self, *, use_orig_values: bool = True, redact_sensitive: bool = True, resolve_env: bool = False
    ) -> dict[Any, Any]:
        """A plain dict that is safe to print and to save.

        Args:
            use_orig_values: Keep the strings of the recipe instead of the values that they spell. Placeholders such as
                `${VAR}` stay either way.
            redact_sensitive: Hide values under sensitive keys and passwords inside URLs. Placeholders stay.
            resolve_env: Show the values that placeholders resolve to.
        """
        spelling: Spelling = "resolved" if resolve_env else "written" if use_orig_values else "placeholders"
        safe: dict[Any, Any] = printable(self, spelling=spelling, redact=redact_sensitive)
        return safe

    def _moved_to(self, path: str) -> "ConfigNode":
        moved = ConfigNode(path=path)
        moved._sources = dict(self._sources)
        moved._values = {key: _moved(value, path=moved.place_of(key)) for key, value in self._values.items()}
        return moved

    def _set(self, key: Any, value: object, *, origin: Origin = IN_CODE) -> None:
        self._put(key, *_wrap(value, path=self.place_of(key), origin=origin, is_target=key == "_target_"))

    def _source(self, key: Any) -> Source:
        return self._sources[key]

    def _put(self, key: Any, value: Any, source: Source) -> None:
        self._values[key], self._sources[key] = value, source

    def _deepest(self, dotted: str, parts: list[str]) -> "tuple[ConfigNode | ConfigList, list[Any]]":
        """The container in which to set a dotted path, and the keys to make there; the last one may exist."""
        found = find(self, dotted)
        if found is not None and isinstance(found[0], ConfigNode | ConfigList):
            return found[0], [found[1]]
        node: Any = self
        for index, part in enumerate(parts):
            if isinstance(node, ConfigList) and find_key(node, part) is ABSENT:
                raise ValueError(f"cannot set {dotted!r}: {part!r} is no position in a list of {len(node)}")
            key = find_key(node, part)
            below = None if key is ABSENT else node._values[key] if isinstance(node, ConfigNode) else node[key]
            if below is None or index == len(parts) - 1:
                return node, [part if key is ABSENT else key, *parts[index + 1 :]]
            if not isinstance(below, ConfigNode | ConfigList):
                place = ".".join(parts[: index + 1])
                raise ValueError(f"cannot set {dotted!r}: {place!r} is {node.shown(key)}, not a mapping")
            node = below
        raise AssertionError("a dotted path has at least one part")


class _Items(ItemsView[Any, Any]):
    """The items of a node, printed as they may be printed."""

    def __init__(self, node: ConfigNode) -> None:
        super().__init__(node._values)
        self._node = node

    def __repr__(self) -> str:
        return repr(self._node.to_yaml_dict().items())


class ConfigList(list[Any], Container):
    """A list of a recipe: wrapped elements, and what the recipe says for them."""

    def __init__(self, raw: Iterable[Any] = (), *, path: str = "", origin: Origin = IN_CODE) -> None:
        super().__init__()
        self._path = path
        self._written: list[tuple[Any, Source]] = []
        for index, item in enumerate(raw):
            if isinstance(raw, LocatedList):
                origin = Origin(kind="file", file=raw.file, line=raw.lines[index])
            made = _wrap(item, path=f"{path}.{index}", origin=origin)
            self.append(made[0])
            self._written.append(made)

    def __getitem__(self, index: Any) -> Any:
        """An element, or a list of the same kind for a slice."""
        found = super().__getitem__(index)
        return _rebuild_list(found, self._path, list(self._written)) if isinstance(index, slice) else found

    def copy(self) -> "ConfigList":
        """A list of the same elements."""
        return self[:]  # type: ignore[no-any-return]

    def entries(self) -> Iterator[tuple[int, Any, Source]]:
        """Each position with its element, and what the recipe says there.

        An element that code moved keeps what the recipe says for it, and so does one that is equal to one from the
        recipe; there is nothing for others that code put there.
        """
        known: dict[Any, Source] | None = None
        for index, item in enumerate(self):
            source = self._source_there(index)
            if source is None:
                known = self._known() if known is None else known
                source = known.get(_identity(item), Source(origin=IN_CODE))
            yield index, item, source

    def place_of(self, key: Any) -> str:
        """The dotted path of a position in the recipe."""
        return f"{self._path}.{key}"

    def text(self, index: int) -> str | None:
        """The string that the recipe holds at a position, not yet translated; None where it holds no string."""
        return self._source(index).text

    def shown(self, index: int) -> str:
        """The element at a position as a message may print it: its placeholder, `<redacted>`, or its repr."""
        return show(self[index], self._source(index), Secrecy.NONE)

    def __repr__(self) -> str:
        return repr(printable(self, spelling="written", redact=True))

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_list, (list(self), self._path, list(self._written))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConfigList":
        return self._moved_to(self._path)

    def _source(self, index: int) -> Source:
        there = self._source_there(index)
        return self._known().get(_identity(self[index]), Source(origin=IN_CODE)) if there is None else there

    def _source_there(self, index: int) -> Source | None:
        """What the recipe says for an element that stands where the recipe has it, or that carries it itself."""
        item = self[index]
        value, source = self._written[index] if index < len(self._written) else (ABSENT, Source(origin=IN_CODE))
        if _identity(item) == _identity(value):
            return source
        return item.source(IN_CODE) if isinstance(item, EnvironmentString) else None

    def _known(self) -> dict[Any, Source]:
        """What the recipe says for the elements that it gave, wherever they are now; one from a placeholder wins."""
        pairs = sorted(self._written, key=lambda pair: pair[1].holds_placeholder)
        return {_identity(value): source for value, source in pairs}

    def _put(self, index: int, value: Any, source: Source) -> None:
        self._written += [(ABSENT, Source(origin=IN_CODE))] * (index + 1 - len(self._written))
        self[index] = value
        self._written[index] = value, source

    def _moved_to(self, path: str) -> "ConfigList":
        """A copy at another place, its values as they are."""
        items = [_moved(item, path=f"{path}.{index}") for index, item in enumerate(self)]
        sources = [source for _, _, source in self.entries()]
        return _rebuild_list(items, path, list(zip(items, sources, strict=True)))


def _rebuild_list(items: list[Any], path: str, written: list[tuple[Any, Source]]) -> ConfigList:
    made = ConfigList(path=path)
    made.extend(items)
    made._written = written
    return made


def _identity(value: Any) -> Any:
    """What two values share that are the same, or equal texts or numbers of one type."""
    return (type(value), value) if isinstance(value, str | int | float) else id(value)


def _names_callable(key: object) -> bool:
    return isinstance(key, str) and (key == "_target_" or key.endswith("_fn"))


def _wrap(value: object, *, path: str, origin: Origin, is_target: bool = False) -> tuple[Any, Source]:
    """The value of a configuration from what a recipe or code gives, and what the recipe says for it."""
    match value:
        case ConfigNode() | ConfigList():
            return _moved(value, path=path), Source(origin=origin)
        case Mapping():
            return ConfigNode(value, path=path, origin=origin), Source(origin=origin)
        case list() | tuple():
            return ConfigList(value, path=path, origin=origin), Source(origin=origin)
        case EnvironmentString():
            return value, value.source(origin)
        case str() if is_target:
            return value, Source(origin=origin, written=value, text=value)
        case str() if has_placeholder(value):
            with note(f"while resolving {path}{in_file(Source(origin=origin))}"):
                expansion = expand(value)
            source = Source.of_text(value, expansion, origin)
            resolved = translate_value(expansion.text)
            return EnvironmentString(resolved, value, source) if isinstance(resolved, str) else resolved, source
        case str():
            return translate_value(value), Source(origin=origin, written=value, text=value)
        case _:
            return value, Source(origin=origin)


def _moved(value: Any, *, path: str) -> Any:
    """A copy of a wrapped value for another place; nothing is translated or resolved again."""
    match value:
        case ConfigNode() | ConfigList():
            return value._moved_to(path)
        case str():
            return value
        case _ if callable(value):
            return value
        case _:
            return copy.deepcopy(value)


def _new_key(container: Any, key: Any) -> Any:
    """A key to make in a mapping: a number where all keys there are numbers."""
    if not isinstance(container, ConfigNode) or key in container._values or not isinstance(key, str):
        return key
    is_number = re.fullmatch(r"-?[0-9]{1,1000}", key) is not None
    if is_number and len(container) and all(type(name) is int for name in container):
        return int(key)
    return key


def _argument(value: Any) -> Any:
    match value:
        case ConfigNode() if "_target_" in value:
            return value.instantiate()
        case ConfigNode():
            return value.arguments()
        case list():
            return [_argument(item) for item in value]
        case EnvironmentString():
            return str(value)
        case _:
            return value


def _resolve_below(value: Any) -> None:
    match value:
        case ConfigNode():
            value.resolve_targets()
        case list():
            for item in value:
                _resolve_below(item)
