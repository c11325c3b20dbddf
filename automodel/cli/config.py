"""`automodel config`: what a recipe may say, and what one says and from where."""

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from automodel.cli.complaints import complain

if TYPE_CHECKING:
    from automodel.config.descriptions import SettingDescription
    from automodel.recipes.listing import ListedValue
    from automodel.recipes.schema import SectionDescription

__all__ = ["add_arguments", "run"]

_USAGE_ERROR = 2
_MISTAKES = (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError)
_WIDTH = 100
_WIDEST_NAME = 32
_WIDEST_VALUE = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `config schema` and `config show`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "list the sections and keys of a recipe, with type, default and help"
    schema = actions.add_parser("schema", help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    schema.add_argument(
        "section", metavar="SECTION", nargs="?", help="one section only; for those with a _target_ also its arguments"
    )
    text = "print a recipe with overrides, defaults and where each value comes from; secrets stay hidden"
    show = actions.add_parser(
        "show",
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage="automodel config show RECIPE [options] [--section.key value ...]",
        allow_abbrev=False,
    )
    show.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    show.add_argument("--no-defaults", action="store_true", help="leave out the keys that the recipe does not give")
    for action in (schema, show):
        action.add_argument("--json", action="store_true", help="print one JSON value instead of text")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        return _schema(args) if args.action == "schema" else _show(args)
    except BrokenPipeError:
        raise
    except _MISTAKES as error:
        return complain(error, status=_USAGE_ERROR, with_traceback=None)


def _schema(args: argparse.Namespace) -> int:
    from automodel.recipes.schema import KNOWN_SECTIONS, describe_section

    if args.overrides:
        raise ValueError(f"unexpected argument {args.overrides[0]!r}: config schema takes one SECTION")
    names = sorted(KNOWN_SECTIONS) if args.section is None else [args.section]
    sections = [describe_section(name, with_arguments=args.section is not None) for name in names]
    sections.sort(key=lambda section: _KINDS.index(section.kind))
    if args.json:
        print(json.dumps([dataclasses.asdict(section) for section in sections], indent=2, default=str))
    else:
        print("\n\n".join("\n".join(_section_lines(section)) for section in sections))
    return 0


_KINDS = ("value", "settings", "target", "metadata", "planned")


def _section_lines(section: "SectionDescription") -> Iterator[str]:
    state = {"planned": " - not available yet", "metadata": " - passed over"}.get(section.kind, "")
    state += " - required" if section.required else ""
    yield from textwrap.wrap(f"{section.name}{state}: {section.help}", _WIDTH, subsequent_indent="    ")
    if section.kind == "planned":
        off = f", or {section.off}" if section.off else ""
        yield f"  off: left out, null{off}"
    if section.kind == "value":
        (setting,) = section.settings
        yield f"  {setting.type}, default {_spelled(setting.default)}"
    else:
        yield from _setting_lines(section.settings, typed=section.kind != "planned")
    if section.passed_over:
        yield "  known from other recipes, and passed over where they change nothing:"
        yield from _setting_lines(section.passed_over)
    for target in section.targets:
        yield f"  _target_: {target.target}"
        yield from textwrap.wrap(target.help, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        if target.arguments is not None:
            yield from _setting_lines(target.arguments, indent=6)
    if section.kind == "target":
        yield "  (any other callable too: its dotted path, or path/file.py:symbol)"


def _setting_lines(settings: "Sequence[SettingDescription]", *, typed: bool = True, indent: int = 2) -> Iterator[str]:
    """A line for each setting, more where its help is long: name, default, type and help."""
    if not settings:
        return
    names = min(max(len(setting.key) for setting in settings), _WIDEST_NAME)
    defaults = [
        ("required" if setting.required else _spelled(setting.default)) if typed else "" for setting in settings
    ]
    column = min(max(map(len, defaults)), 14)
    for setting, default in zip(settings, defaults, strict=True):
        head = f"{'':{indent}}{setting.key:<{names}}  " + (f"{default:<{column}}  " if typed else "")
        text = f"{setting.type}: {setting.help}" if typed and setting.help else setting.help or setting.type
        if setting.available is not None:
            text += f"; available so far: {', '.join(map(_spelled, setting.available))}"
        margin = indent + names + 2 + (column + 2 if typed else 0)
        first, *more = textwrap.wrap(text, max(_WIDTH - margin, 30)) or [""]
        if len(head) > margin:
            yield head.rstrip()
            head = " " * margin
        yield (head + first).rstrip()
        yield from (" " * margin + line for line in more)


def _spelled(value: object) -> str:
    from automodel.config.descriptions import spell_yaml

    return spell_yaml(value)


def _show(args: argparse.Namespace) -> int:
    from automodel.config.loader import load_yaml_config
    from automodel.config.overrides import apply_overrides, parse_overrides
    from automodel.recipes.catalogue import find_recipe
    from automodel.recipes.listing import list_values
    from automodel.recipes.schema import TARGET_SECTIONS
    from automodel.recipes.sections import check_sections

    path = find_recipe(args.recipe)
    config = load_yaml_config(path)
    overrides = parse_overrides(args.overrides)
    apply_overrides(config, overrides)
    values = list_values(config, with_defaults=not args.no_defaults)
    if args.json:
        print(json.dumps([_as_json(value) for value in values], indent=2, default=str))
    else:
        print(f"# {path}")
        print("\n".join(_value_lines(values)))
    overridden = {override.path.partition(".")[0] for override in overrides}
    # Targets are imported where an override has to be checked against them, and left alone otherwise.
    check_sections(config, targets=[name for name in TARGET_SECTIONS if name in overridden])
    return 0


def _as_json(value: "ListedValue") -> dict[str, Any]:
    origin = {"kind": "default"} if value.origin is None else value.origin._asdict()
    return {"path": value.dotted, "value": value.value, "origin": origin}


def _value_lines(values: "Sequence[ListedValue]") -> Iterator[str]:
    """The values as YAML, each with a comment that says where it comes from."""
    rows = list(_rows(values))
    column = min(max((len(text) for text, comment in rows if comment), default=0), _WIDEST_VALUE)
    for text, comment in rows:
        yield f"{text:<{column}}  # {comment}" if comment else text


def _rows(values: "Sequence[ListedValue]") -> Iterator[tuple[str, str]]:
    """Lines of YAML and their comments; the keys above a value come before it, once."""
    above: tuple[Any, ...] = ()
    for value in values:
        *parents, last = value.path
        shared = 0
        while shared < len(parents) and value.path[: shared + 1] == above[: shared + 1]:
            shared += 1
        for depth in range(shared, len(parents)):
            yield "  " * depth + _key(parents[depth]), ""
        yield f"{'  ' * len(parents)}{_key(last)} {_spelled(value.value)}", _comment(value)
        above = value.path


def _key(key: Any) -> str:
    from automodel.recipes.listing import Position

    return "-" if isinstance(key, Position) else f"{_spelled(key)}:"


def _comment(value: "ListedValue") -> str:
    origin = value.origin
    if origin is None:
        return "default"
    parts = [f"environment {name}" for name in origin.variables]
    parts += [f"{name} is not set" for name in origin.defaults]
    if origin.kind == "file":
        parts.append(f"line {origin.line}")
    elif origin.kind == "override":
        parts.append("override")
    return ", ".join(parts)
