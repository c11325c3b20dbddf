"""`automodel`: finds the sub-command, and turns expected errors into messages."""

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from automodel._version import __version__
from automodel.cli.output import silence_stdout

__all__ = ["main"]

_COMMANDS = {
    "run": "train from a recipe",
    "recipes": "list the recipes that are shipped",
    "config": "explain what a recipe may say, and what one says",
    "embeddings": "find damaged rows of a model's input embedding, and repair a copy",
    "env": "print what a bug report needs",
}
_WITH_OVERRIDES = ("run", "config")
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 for a failed run, 2 for a mistake in what was asked."""
    started = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] not in _COMMANDS and not words[0].startswith("-"):
        words.insert(0, "run")
    parser = _make_parser(words[0] if words else None)
    options, rest = parser.parse_known_args(words)
    if options.command is None:
        parser.print_help()
        return _USAGE_ERROR
    if rest and options.command not in _WITH_OVERRIDES:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.started, options.words, options.overrides = started, words, rest
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        status: int = importlib.import_module(f"automodel.cli.{options.command}").run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        return 0
    return status


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors point to the help; of several processes one prints them."""

    def error(self, message: str) -> NoReturn:
        from automodel.distributed.env import is_speaker

        text = f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n"
        self.exit(_USAGE_ERROR, text if is_speaker() else None)


def _make_parser(command: str | None) -> argparse.ArgumentParser:
    """Build the parser; only the sub-command that runs declares its options, so that only its module is imported."""
    parser = _Parser(
        prog="automodel",
        description="Train hybrid language models from a YAML recipe.",
        epilog="'automodel RECIPE' is short for 'automodel run RECIPE'.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"automodel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == command:
            importlib.import_module(f"automodel.cli.{name}").add_arguments(subparser)
    return parser
