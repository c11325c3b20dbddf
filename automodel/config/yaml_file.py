"""Reading one YAML file strictly: mappings only, no duplicate keys, errors that name file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

__all__ = ["YamlFileError", "read_yaml_mapping"]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlFileError(ValueError):
    """A recipe file that is no readable YAML mapping; the message names the file and, where known, the line."""


class _StrictLoader(_Loader):  # type: ignore[misc]
    """YAML's safe loader, which refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping; keys merged in by `<<` may be overridden, keys written twice may not."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
                seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


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
    if value is None:
        raise YamlFileError(f"{file} is empty")
    if not isinstance(value, dict):
        raise YamlFileError(f"{file}: the top level must be a mapping, got a {type(value).__name__}")
    return value
