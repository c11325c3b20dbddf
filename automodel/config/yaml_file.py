"""Reading one YAML file strictly: mappings only, no duplicate keys, errors that name file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

__all__ = ["YamlFileError", "read_yaml_mapping"]

_MERGE = "tag:yaml.org,2002:merge"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlFileError(ValueError):
    """A recipe file that is no readable YAML mapping; the message names the file and, where known, the line."""


class _StrictLoader(_Loader):  # type: ignore[misc]
    """YAML's safe loader, which refuses a key that stands twice in one mapping."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge in what `<<` names: a mapping's own keys win, then those of the mapping that is named first."""
        own = [(key, value) for key, value in node.value if key.tag != _MERGE]
        merged = [value for key, value in node.value if key.tag == _MERGE]
        self._refuse_duplicates([key for key, _ in own])
        sources = [part for value in merged for part in (value.value if value.id == "sequence" else [value])]
        pairs: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(None, None, "<< takes mappings only", source.start_mark)
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
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
                seen.add(key)


def _identity(key_node: yaml.Node) -> Hashable:
    """What makes two key nodes the same key: the text and type of a scalar."""
    return (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else id(key_node)


def read_yaml_mapping(path: str | Path) -> dict[Any, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        YamlFileError: the file is empty, no mapping, not UTF-8, has a duplicate key, or is not valid YAML.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise YamlFileError(f"{file} is not UTF-8: {error}") from None
    try:
        # A subclass of the safe loader: it builds plain Python values only.
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(file)
        raise YamlFileError(f"{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise YamlFileError(f"{file}: {error}") from None
    except ValueError as error:
        # A scalar that YAML takes for a date or a number and Python does not, such as 2024-13-45.
        raise YamlFileError(f"{file}: {error}") from None
    if value is None:
        raise YamlFileError(f"{file} is empty")
    if not isinstance(value, dict):
        raise YamlFileError(f"{file}: the top level must be a mapping, got a {type(value).__name__}")
    return value
