"""Where a value of a recipe comes from, and what the recipe says there."""

from typing import Literal, NamedTuple, Self

from automodel.config.env import Expansion, has_placeholder

__all__ = ["IN_CODE", "EnvironmentString", "Origin", "Source", "in_file"]


class Origin(NamedTuple):
    """Where a value comes from: a line of a file, an override, or Python code.

    Attributes:
        kind: The place of the text.
        file: The file, where the kind is "file".
        line: Its line, counted from 1.
        variables: The environment variables whose values stand in the value.
        defaults: The variables that were not set, so that the default in the placeholder stands.
    """

    kind: Literal["file", "override", "code"]
    file: str | None = None
    line: int | None = None
    variables: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.file}:{self.line}" if self.kind == "file" else self.kind]
        parts += [f"environment variable {name}" for name in self.variables]
        parts += [f"default of {name}" for name in self.defaults]
        return ", ".join(parts)


IN_CODE = Origin(kind="code")
"""The origin of what Python code sets."""


class Source(NamedTuple):
    """What a recipe says for one value.

    Attributes:
        origin: Where it says so.
        written: The string that it holds; None where YAML or code gave another type.
        text: The same string, placeholders resolved, before its translation.
        environment: The variables and their values that took a placeholder's place.
    """

    origin: Origin
    written: str | None = None
    text: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_text(cls, written: str, expansion: Expansion, origin: Origin) -> Self:
        """The source of a value that `written` gives, its placeholders replaced as `expansion` says."""
        variables = tuple(dict.fromkeys(name for name, _ in expansion.environment))
        if variables or expansion.defaults:
            origin = origin._replace(variables=variables, defaults=expansion.defaults)
        return cls(origin=origin, written=written, text=expansion.text, environment=expansion.environment)

    @property
    def holds_placeholder(self) -> bool:
        """Whether the recipe holds an environment placeholder here."""
        return self.written is not None and has_placeholder(self.written)


class EnvironmentString(str):
    """A string that came from a placeholder; `_orig_value` keeps the text that the recipe holds, and repr shows it."""

    _orig_value: str
    _source: Source | None

    def __new__(cls, value: str, orig_value: str, source: Source | None = None) -> Self:
        """Make the resolved string `value` that prints as `orig_value` in configurations."""
        made = super().__new__(cls, value)
        made._orig_value = orig_value
        made._source = source
        return made

    def source(self, origin: Origin) -> Source:
        """What the recipe says for this string; `origin` is where it stands if it does not know."""
        return self._source or Source(origin=origin, written=self._orig_value, text=str(self))

    def __getnewargs__(self) -> tuple[str, str, Source | None]:  # type: ignore[override]
        return str(self), self._orig_value, self._source

    def __repr__(self) -> str:
        return repr(self._orig_value)


def in_file(source: Source | None) -> str:
    """Where in a file a value stands, for the end of a message: ` (recipe.yaml:12)`; empty for one in no file."""
    origin = source.origin if source is not None else IN_CODE
    return f" ({origin.file}:{origin.line})" if origin.kind == "file" else ""
