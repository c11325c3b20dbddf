"""`automodel env`: print what a bug report needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `automodel env`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print versions, devices, CPU features, cache roots and the redacted environment; returns the exit status."""
    from automodel.observe.environment import collect_environment

    sections = collect_environment()
    print(json.dumps(sections, indent=2) if args.json else _format_table(sections))
    return 0


def _format_table(sections: dict[str, dict[str, str]]) -> str:
    """Each section under its name, its values in one aligned column."""
    blocks = []
    for section, values in sections.items():
        width = max((len(name) for name in values), default=0)
        lines = [f"  {name.ljust(width)}  {_one_line(value)}" for name, value in values.items()]
        blocks.append("\n".join([section, *(lines or ["  (nothing)"])]))
    return "\n\n".join(blocks)


def _one_line(value: str) -> str:
    """Line breaks and control characters escaped, so that a value cannot upset the table."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in value)
