"""ConfigNode: a recipe as nested nodes with typed scalars, resolvable targets and placeholders that print safely."""

import copy
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import yaml

from automodel.config.env import has_placeholder, interpolate, resolve_yaml_env_vars
from automodel.config.names import did_you_mean
from automodel.config.notes import note
from automodel.config.redact import REDACTED, is_sensitive_key, redact_text
from automodel.config.scalars import spell_value, translate_value
from automodel.config.targets import load_module_from_file, resolve_target, set_enable_user_modules
from automodel.config.yaml_file import read_yaml_mapping

__all__ = [
    "ConfigNode",
    "EnvironmentString",
    "load_module_from_file",
    "load_yaml_config",
    "resolve_target",
    "resolve_yaml_env_vars",
    "set_enable_user_modules",
    "translate_value",
]


class EnvironmentString(str):
    """A string that came from a placeholder; `_orig_value` keeps the text that the recipe holds."""

    _orig_value: str

    def __new__(cls, value: str, orig_value: str) -> Self:
        """Make the resolved string `value` that prints as `orig_value` in configurations."""
        made = super().__new__(cls, value)
        made._orig_value = orig_value
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self._orig_value


def load_yaml_config(path: str | Path) -> "ConfigNode":
    """Read a recipe file into a ConfigNode: scalars translated, environment placeholders resolved, nothing imported.

    Raises:
        FileNotFoundError: there is no such file.
        YamlFileError: the file is no readable YAML mapping.
        KeyError: a placeholder names a variable that is not set and has no default.
    """
    return ConfigNode(read_yaml_mapping(path))


class ConfigNode:
    """One mapping of a recipe, with attribute and item access.

    Values: nested mappings are ConfigNodes, lists are wrapped element by element, strings are translated
    (`translate_value`) after their placeholders were resolved. `_target_` and keys that end in `_fn` give the
    callable they name, resolved at first access. A key that is named like a method is reachable by `[]` only.

    Args:
        raw: The mapping as YAML gives it; it is copied.
        path: The dotted place of this node in its recipe, for error messages; "" at the top.
    """

    def __init__(self, raw: Mapping[Any, Any] | None = None, *, path: str = "") -> None:
        self._path = path
        self._values: dict[Any, Any] = {}
        # What the recipe says where that differs from the value: placeholders, and the names of callables.
        self._written: dict[Any, Any] = {}
        for key, value in (raw or {}).items():
            self._set(key, value)

    @property
    def raw_config(self) -> dict[Any, Any]:
        """The mapping as the recipe writes it: placeholders unresolved, targets as names."""
        return {key: _as_written(self._written.get(key, value)) for key, value in self._values.items()}

    @property
    def path(self) -> str:
        """The dotted place of this node in its recipe; "" at the top."""
        return self._path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in {"_values", "_written", "_path"}:
            raise AttributeError(name)
        if name in self._values:
            return self[name]
        known = [key for key in self._values if isinstance(key, str)]
        raise AttributeError(f"the configuration has no {self._place(name)!r}{did_you_mean(name, known)}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in {"_values", "_written", "_path"}:
            object.__setattr__(self, name, value)
        else:
            self._set(name, value)

    def __getitem__(self, key: Any) -> Any:
        value = self._values[key]
        if _names_callable(key) and not callable(value) and (key == "_target_" or isinstance(value, str)):
            with note(f"while resolving {self._place(key)}"):
                value = resolve_target(value)
            self._written[key] = self._values[key]
            self._values[key] = value
        return value

    def __setitem__(self, key: Any, value: object) -> None:
        self._set(key, value)

    def __contains__(self, key: object) -> bool:
        if key in self._values:
            return True
        if not isinstance(key, str) or "." not in key:
            return False
        missing = object()
        return self.get(key, missing) is not missing

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigNode) and self.raw_config == other.raw_config

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConfigNode":
        return self._moved_to(self._path)

    # Values travel as they are: a placeholder is resolved once, not again where the node is copied to. Callables
    # travel as their names, since the module of a file target exists in this process only.
    def __getstate__(self) -> dict[str, Any]:
        values = {
            key: self._written[key] if callable(value) and key in self._written else value
            for key, value in self._values.items()
        }
        return {"path": self._path, "values": values, "written": self._written}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._values, self._written = state["path"], state["values"], state["written"]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        text: str = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True)
        return text

    def items(self) -> ItemsView[Any, Any]:
        """The keys and values of this node; callables are given as the recipe names them until they are accessed."""
        return self._values.items()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value at a key or dotted path (`"model.config.n_layer"`, `"list.0"`), or `default`."""
        if key in self._values:
            return self[key]
        if not isinstance(key, str):
            return default
        found: Any = self
        for part in key.split("."):
            if isinstance(found, ConfigNode) and part in found._values:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return default
        return found

    def set_by_dotted(self, dotted: str, value: object) -> None:
        """Set the value at a dotted path, making the mappings on the way; an integer part indexes a list.

        Raises:
            ValueError: the path leads through a value that is no mapping or list, or past the end of a list.
        """
        parts = dotted.split(".")
        if not all(parts):
            raise ValueError(f"{dotted!r} is not a dotted path")
        node: Any = self
        for index, part in enumerate(parts[:-1]):
            node = _descend(node, part, dotted=dotted, place=".".join(parts[:index]))
        last = parts[-1]
        if isinstance(node, _ConfigList):
            node.put(_list_position(node, last, dotted=dotted), value, path=dotted)
        elif isinstance(node, ConfigNode):
            node._set(last, value)
        else:
            raise ValueError(f"cannot set {dotted!r}: {'.'.join(parts[:-1])!r} is {node!r}, not a mapping")

    def get_as_string(self, key: str, default: str | None = None) -> str | None:
        """Return the value at a dotted path as its text, or `default` where there is none."""
        value = self.get(key)
        return default if value is None else str(value)

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
        with self.note_instantiation():
            return target(*args, **arguments)

    def instantiate_path(self, dotted: str, default: Any = None, *args: Any, **overrides: Any) -> Any:
        """Instantiate the node at a dotted path; return `default` where there is none."""
        node = self.get(dotted)
        return default if node is None else node.instantiate(*args, **overrides)

    def arguments(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The keyword arguments that `instantiate` passes: every key but `_target_`, nested targets instantiated.

        Args:
            without: Keys to leave out, whose targets are then not called either.
        """
        return {key: _argument(self[key]) for key in self._values if key != "_target_" and key not in without}

    def note_instantiation(self) -> AbstractContextManager[None]:
        """A context that adds this node's place and target to the errors of a call made on its behalf."""
        target = self._written.get("_target_", self._values.get("_target_"))
        return note(f"while instantiating {self._path or '<top>'} (_target_: {target})")

    def resolve_targets(self) -> None:
        """Resolve every `_target_` and `*_fn` of this node and below now, so that a bad name fails early.

        Raises:
            ImportError, InvalidFileTargetError: a name cannot be resolved; a note says where it stands.
        """
        for key in list(self._values):
            _resolve_below(self[key])

    def to_dict(self) -> dict[Any, Any]:
        """The plain resolved values, secrets included; callables as the names that the recipe uses."""
        return {
            key: _plain(self._written[key] if callable(value) and key in self._written else value)
            for key, value in self._values.items()
        }

    def to_yaml_dict(
        self, *, use_orig_values: bool = True, redact_sensitive: bool = True, resolve_env: bool = False
    ) -> dict[Any, Any]:
        """A plain dict that is safe to print and to save.

        Args:
            use_orig_values: Keep placeholders such as `${VAR}` instead of the values they resolve to.
            redact_sensitive: Hide values under sensitive keys and passwords inside URLs.
            resolve_env: Show resolved values even where placeholders are kept otherwise.
        """
        written = use_orig_values and not resolve_env
        source = self.raw_config if written else self.to_dict()
        safe: dict[Any, Any] = _printable(source, redact=redact_sensitive, written=written)
        return safe

    def _moved_to(self, path: str) -> "ConfigNode":
        moved = ConfigNode(path=path)
        moved._written = dict(self._written)
        moved._values = {key: _moved(value, path=moved._place(key)) for key, value in self._values.items()}
        return moved

    def _place(self, key: Any) -> str:
        return f"{self._path}.{key}" if self._path else str(key)

    def _set(self, key: Any, value: object) -> None:
        self._written.pop(key, None)
        if key == "_target_":
            self._values[key] = value
            return
        wrapped = _wrap(value, path=self._place(key))
        if isinstance(value, str) and has_placeholder(value):
            self._written[key] = value
        self._values[key] = wrapped


class _ConfigList(list[Any]):
    """A list of a recipe: wrapped elements, and the placeholders that some of them came from."""

    def __init__(self, raw: Iterable[Any] = (), *, path: str = "") -> None:
        super().__init__()
        self._placeholders: dict[int, tuple[str, Any]] = {}
        for index, item in enumerate(raw):
            self.append(None)
            self.put(index, item, path=f"{path}.{index}")

    def put(self, index: int, raw: Any, *, path: str) -> None:
        """Set one element from what a recipe writes."""
        value = _wrap(raw, path=path)
        self[index] = value
        self._placeholders.pop(index, None)
        if isinstance(raw, str) and has_placeholder(raw):
            self._placeholders[index] = (raw, value)

    def as_written(self) -> list[Any]:
        """The elements as the recipe writes them; an element that was replaced since is written as it is now."""
        written = []
        for index, item in enumerate(self):
            placeholder, resolved = self._placeholders.get(index, ("", None))
            kept = placeholder and type(item) is type(resolved) and item == resolved
            written.append(placeholder if kept else _as_written(item))
        return written

    def moved_to(self, path: str) -> "_ConfigList":
        """A copy at another place, its values as they are."""
        moved = _ConfigList()
        moved.extend(_moved(item, path=f"{path}.{index}") for index, item in enumerate(self))
        moved._placeholders = dict(self._placeholders)
        return moved


def _names_callable(key: object) -> bool:
    return isinstance(key, str) and (key == "_target_" or key.endswith("_fn"))


def _wrap(value: object, *, path: str) -> Any:
    match value:
        case ConfigNode() | _ConfigList():
            return _moved(value, path=path)
        case Mapping():
            return ConfigNode(value, path=path)
        case list() | tuple():
            return _ConfigList(value, path=path)
        case EnvironmentString():
            return value
        case str() if has_placeholder(value):
            with note(f"while resolving {path}"):
                resolved = translate_value(interpolate(value))
            return EnvironmentString(resolved, value) if isinstance(resolved, str) else resolved
        case _:
            return translate_value(value)


def _moved(value: Any, *, path: str) -> Any:
    """A copy of a wrapped value for another place; nothing is translated or resolved again."""
    match value:
        case ConfigNode():
            return value._moved_to(path)
        case _ConfigList():
            return value.moved_to(path)
        case _ if callable(value):
            return value
        case _:
            return copy.deepcopy(value)


def _descend(node: Any, part: str, *, dotted: str, place: str) -> Any:
    if isinstance(node, list):
        return node[_list_position(node, part, dotted=dotted)]
    if not isinstance(node, ConfigNode):
        raise ValueError(f"cannot set {dotted!r}: the way leads through {place!r}, which is {node!r}, not a mapping")
    if node._values.get(part) is None:
        node._set(part, {})
    return node._values[part]


def _list_position(values: Sequence[Any], part: str, *, dotted: str) -> int:
    if not part.isdecimal() or int(part) >= len(values):
        raise ValueError(f"cannot set {dotted!r}: {part!r} is no position in a list of {len(values)}")
    return int(part)


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


def _as_written(value: Any) -> Any:
    match value:
        case ConfigNode():
            return value.raw_config
        case _ConfigList():
            return value.as_written()
        case EnvironmentString():
            return value._orig_value
        case _:
            return spell_value(value)


def _plain(value: Any) -> Any:
    match value:
        case ConfigNode():
            return value.to_dict()
        case list():
            return [_plain(item) for item in value]
        case EnvironmentString():
            return str(value)
        case _:
            return value


def _printable(value: Any, *, redact: bool, written: bool) -> Any:
    match value:
        case Mapping():
            return {
                key: REDACTED
                if redact and isinstance(key, str) and is_sensitive_key(key) and _holds_secret(item, written=written)
                else _printable(item, redact=redact, written=written)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_printable(item, redact=redact, written=written) for item in value]
        case str():
            return redact_text(str(value)) if redact else str(value)
        case None | bool() | int() | float():
            return value
        case _:
            return getattr(value, "__qualname__", None) or str(value)


def _holds_secret(value: object, *, written: bool) -> bool:
    """An empty value is safe to show, and so is a placeholder; a resolved value may hold a dollar sign of its own."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    return not (written and isinstance(value, str) and has_placeholder(value))
