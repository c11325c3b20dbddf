"""Every value of a recipe as it may be printed, with where it comes from, the defaults that it leaves among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from automodel.config.descriptions import describe_settings
from automodel.config.loader import ConfigNode
from automodel.config.node import ConfigList
from automodel.config.origins import Origin, Source
from automodel.config.redact import REDACTED
from automodel.recipes.schema import SETTINGS_SECTIONS

__all__ = ["ListedValue", "Position", "list_values"]

Path = tuple[Any, ...]


class Position(int):
    """A position in a list, as part of a path; a plain integer there is a key."""


@dataclass(frozen=True, kw_only=True)
class ListedValue:
    """One value of a recipe.

    Attributes:
        path: The keys and list positions that lead to it.
        value: The value as it may be printed: the placeholder where the environment holds it, secrets hidden. Mappings
            are listed by their elements, and so are lists of more than scalars from one place.
        origin: Where it comes from; None for the default of a key that the recipe leaves out.
    """

    path: Path
    value: Any
    origin: Origin | None

    @property
    def dotted(self) -> str:
        """The path as overrides are written."""
        return ".".join(map(str, self.path))


def list_values(config: ConfigNode, *, with_defaults: bool = True) -> list[ListedValue]:
    """List the values in the order of the recipe; the defaults of a section follow the keys that the recipe gives.

    Args:
        config: The recipe, overrides applied.
        with_defaults: List also the keys that the recipe leaves out, of all sections with a fixed schema.
    """
    listed = list(_given(config, config.to_yaml_dict(), ()))
    if not with_defaults:
        return listed
    given = {value.path for value in listed}
    ordered: list[ListedValue] = []
    for name in dict.fromkeys([*config, *SETTINGS_SECTIONS]):
        defaults = name in SETTINGS_SECTIONS and isinstance(config.get(name) or config, ConfigNode)
        # An empty section, or null in its place, is its defaults.
        ordered += [value for value in listed if value.path[0] == name and not (defaults and len(value.path) == 1)]
        if defaults:
            ordered += [value for value in _defaults(name) if value.path not in given]
    return ordered


def _given(container: ConfigNode | ConfigList, printed: Any, path: Path) -> Iterator[ListedValue]:
    """The values at and below a mapping or list, none of whose targets is imported for it."""
    safe = printed if isinstance(container, ConfigList) else printed.values()
    for (key, value, source), shown in zip(container.entries(), safe, strict=True):
        here = (*path, key if isinstance(container, ConfigNode) else Position(key))
        if (isinstance(value, ConfigNode) and value) or (isinstance(value, ConfigList) and _needs_lines(value)):
            yield from _given(value, shown, here)
        else:
            yield ListedValue(path=here, value=_resolved_where_safe(value, shown, source), origin=source.origin)


def _needs_lines(values: ConfigList) -> bool:
    """Whether a list holds more than scalars from one place, so that it does not fit on a line."""
    sources = [source for _, _, source in values.entries()]
    if any(isinstance(value, ConfigNode | list) for value in values):
        return True
    from_environment = any(source.origin.variables or source.origin.defaults for source in sources)
    return from_environment or len({source.origin.kind for source in sources}) > 1


def _resolved_where_safe(value: Any, shown: Any, source: Source) -> Any:
    """The typed value instead of the text that gives it, unless it is secret or the environment's."""
    if source.origin.variables or (isinstance(shown, str) and REDACTED in shown):
        return shown
    if isinstance(value, str):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float) else shown


def _defaults(name: str) -> Iterator[ListedValue]:
    described = list(describe_settings(SETTINGS_SECTIONS[name].section_class()))
    parents = {setting.key.rpartition(".")[0] for setting in described}
    for setting in described:
        if setting.key not in parents:
            yield ListedValue(path=(name, *setting.key.split(".")), value=setting.default, origin=None)
