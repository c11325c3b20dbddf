"""Reading one YAML file strictly: mappings only, no duplicate keys, bounded size, errors that name file and line."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "MAX_BITS",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_VALUES",
    "LocatedList",
    "LocatedMapping",
    "YamlFileError",
    "read_yaml_mapping",
]

MAX_BYTES = 2**20
"""Recipes are small: a larger file is taken for a mistake."""
MAX_DEPTH = 100
"""Mappings and lists may stand inside one another this deep, aliases followed."""
MAX_BITS = 10_000
"""The largest integers of a file: Python does not print much larger ones."""
MAX_VALUES = 100_000
"""A file may hold this many keys and values once its aliases are expanded."""

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_EQUALS = "tag:yaml.org,2002:value"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlFileError(ValueError):
    """A recipe file that is no readable YAML mapping; the message names the file and, where known, the line."""


class LocatedMapping(dict[Any, Any]):
    """A mapping of a YAML file that knows the line of each key.

    Attributes:
        file: The file as the caller named it.
        lines: The line of each key, counted from 1. A key that `<<` merges in keeps the line where it stands.
    """

    file: str
    lines: dict[Any, int]


class LocatedList(list[Any]):
    """A list of a YAML file that knows the line of each element.

    Attributes:
        file: The file as the caller named it.
        lines: The line of each element, counted from 1.
    """

    file: str
    lines: list[int]


class _StrictLoader(_Loader):  # type: ignore[misc]
    """YAML's safe loader, which refuses a key that stands twice in one mapping and remembers lines."""

    file: str

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; one that YAML takes for a date or a number and Python does not (2024-13-45) names its line."""
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            problem = str(error) if isinstance(error, ValueError) else f"not a valid {_spell_tag(node.tag)}"
            raise _refusal(problem, node) from None
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _refusal(f"a number of more than {MAX_BITS:,} bits", node)
        return value

    def construct_located_mapping(self, node: yaml.MappingNode) -> Iterator[LocatedMapping]:
        """Build a mapping, and then its keys and values, since they may refer to it."""
        if not isinstance(node, yaml.MappingNode):
            raise _refusal("expected a mapping", node)
        made = LocatedMapping()
        made.file, made.lines = self.file, {}
        yield made
        self.flatten_mapping(node)
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _refusal("found unhashable key", key_node)
            made[key] = self.construct_object(value_node)
            made.lines[key] = key_node.start_mark.line + 1

    def construct_located_list(self, node: yaml.SequenceNode) -> Iterator[LocatedList]:
        """Build a list, and then its elements, since they may refer to it."""
        if not isinstance(node, yaml.SequenceNode):
            raise _refusal("expected a list", node)
        made = LocatedList()
        made.file, made.lines = self.file, [item.start_mark.line + 1 for item in node.value]
        yield made
        made.extend(self.construct_object(item) for item in node.value)

    def construct_unknown(self, node: yaml.Node) -> Any:
        """Refuse a tag that plain YAML does not have."""
        raise _refusal(f"unknown tag {_spell_tag(node.tag)!r}", node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge in what `<<` names: a mapping's own keys win, then those of the mapping that is named first."""
        own = [(key, value) for key, value in node.value if key.tag != _MERGE]
        merged = [value for key, value in node.value if key.tag == _MERGE]
        self._refuse_duplicates([key for key, _ in own])
        sources = [part for value in merged for part in (value.value if value.id == "sequence" else [value])]
        pairs: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise _refusal("<< takes mappings only", source)
            self.flatten_mapping(source)
            pairs |= {_identity(key): (key, value) for key, value in source.value}
        pairs |= {_identity(key): (key, value) for key, value in own}
        node.value = list(pairs.values())

    def _refuse_duplicates(self, key_nodes: list[yaml.Node]) -> None:
        seen: set[Hashable] = set()
        for key_node in key_nodes:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise _refusal(f"duplicate key {key!r}", key_node)
                seen.add(key)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _StrictLoader.construct_located_mapping)
_StrictLoader.add_constructor("tag:yaml.org,2002:seq", _StrictLoader.construct_located_list)
_StrictLoader.add_constructor(_PLAIN_EQUALS, _StrictLoader.construct_scalar)
_StrictLoader.add_constructor(None, _StrictLoader.construct_unknown)


def read_yaml_mapping(path: str | Path) -> LocatedMapping:
    """Read a YAML file whose top level is a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        YamlFileError: the file is empty, no mapping, not UTF-8, too large or too deep, has a duplicate key or an
            unknown tag, or is not valid YAML.
    """
    text = _read_text(path)
    loader = None
    try:
        loader = _StrictLoader(text)
        loader.file = str(path)
        node = loader.get_single_node()
        if node is None:
            raise YamlFileError(f"{path} is empty")
        if not isinstance(node, yaml.MappingNode):
            raise YamlFileError(f"{path}: the top level must be a mapping, got a {_KINDS.get(node.id, node.id)}")
        _Measure().measure(node)
        value: object = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise YamlFileError(f"{place}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFileError(f"{path}:{line}: {_name_character(error.character)} may not stand in YAML") from None
    except yaml.YAMLError as error:
        raise YamlFileError(f"{path}: {error}") from None
    except RecursionError:
        raise YamlFileError(f"{path}: mappings and lists are nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(value, LocatedMapping):
        raise YamlFileError(f"{path}: the top level must be a plain mapping, got a {type(value).__name__}")
    return value


_KINDS = {"scalar": "single value", "sequence": "list"}


def _read_text(path: str | Path) -> str:
    with Path(path).open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise YamlFileError(f"{path} is larger than {MAX_BYTES:,} bytes, the limit for a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlFileError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}, {error.start} bytes from the start)"
        ) from None


def _name_character(character: object) -> str:
    return f"the character U+{character:04X}" if isinstance(character, int) else f"the character {character!r}"


class _Measure:
    """Counts what a file holds once its aliases are expanded, before anything is expanded."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def measure(self, node: yaml.Node, *, level: int = 0) -> tuple[int, int]:
        """Return how many values stand at `node` and below, and how deep they are nested.

        Raises:
            ConstructorError: too many, too deep, or an alias that refers to what it stands in.
        """
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        if id(node) in self._measured:
            return self._measured[id(node)]
        if id(node) in self._open:
            raise _refusal("an alias refers to the mapping or list that it stands in", node)
        self._open.add(id(node))
        is_mapping = isinstance(node, yaml.MappingNode)
        children = [part for pair in node.value for part in pair] if is_mapping else node.value
        count, depth = 1, 1
        for child in children:
            if level >= MAX_DEPTH:
                raise _refusal(f"mappings and lists are nested more than {MAX_DEPTH} deep", node)
            child_count, child_depth = self.measure(child, level=level + 1)
            count, depth = count + child_count, max(depth, child_depth + 1)
        if depth > MAX_DEPTH:
            raise _refusal(f"mappings and lists are nested more than {MAX_DEPTH} deep", node)
        if count > MAX_VALUES:
            raise _refusal(f"more than {MAX_VALUES:,} values once aliases are expanded, the limit for a recipe", node)
        self._open.remove(id(node))
        self._measured[id(node)] = count, depth
        return count, depth


def _refusal(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _spell_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _identity(key_node: yaml.Node) -> Hashable:
    """What makes two key nodes the same key: the text and type of a scalar."""
    return (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else id(key_node)
