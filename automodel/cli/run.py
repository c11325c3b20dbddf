"""`automodel run RECIPE`: train, or print what would be trained."""

import argparse
import difflib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from automodel.cli.complaints import complain
from automodel.cli.output import say

if TYPE_CHECKING:
    from automodel.config.loader import ConfigNode
    from automodel.recipes.llm import TrainFinetuneRecipeForNextTokenPrediction as Recipe

__all__ = ["add_arguments", "run"]

_OPTIONS = ("dry-run", "run-dir", "nproc-per-node", "traceback")
_FAILED = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; everything else of the form --section.key is an override of the recipe."""
    parser.usage = "automodel run RECIPE [options] [--section.key value ...]"
    parser.epilog = (
        "Any value of the recipe can be replaced: --optimizer.lr 1e-3, --optimizer.lr=1e-3, "
        "--model.config.hidden_size 512; --flag alone means true."
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan and train nothing")
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run; one that exists is continued (default: a new one, runs/RECIPE_DATE-TIME)",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes on this machine")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")


def run(args: argparse.Namespace) -> int:
    """Train, or print the plan; returns the exit status."""
    with ExitStack() as stack:
        try:
            config = _load(args)
            with config.hiding_values():
                if args.dry_run:
                    return _print_plan(config, args)
                recipe = _set_up(config, args, stack)
        except KeyboardInterrupt:
            return complain(KeyboardInterrupt("interrupted"), status=_INTERRUPTED, with_traceback=False)
        except Exception as error:  # noqa: BLE001 - a border: until the job stands, every error is about its recipe
            return complain(error, status=_USAGE_ERROR, with_traceback=args.traceback)
        with config.hiding_values():
            return _train(recipe, args)


def _refuse_misspelt_options(words: Sequence[str]) -> None:
    """Raise where an override is a misspelt option: `--dryrun`, `--run_dir=x`."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and "." not in name and difflib.get_close_matches(name, _OPTIONS, cutoff=0.8):
            near = difflib.get_close_matches(name, _OPTIONS, n=1)[0]
            raise ValueError(f"unknown option --{name} (did you mean --{near}?)")


def _load(args: argparse.Namespace) -> "ConfigNode":
    """Read the recipe and apply the overrides; imports neither torch nor transformers."""
    from automodel.config.loader import load_yaml_config
    from automodel.config.overrides import apply_overrides, parse_overrides
    from automodel.config.sections import NotAvailableYetError
    from automodel.recipes.catalogue import find_recipe

    if args.nproc_per_node != 1:
        raise NotAvailableYetError(f"--nproc-per-node {args.nproc_per_node} is not available yet: one process only")
    _refuse_misspelt_options(args.overrides)
    config = load_yaml_config(find_recipe(args.recipe))
    apply_overrides(config, parse_overrides(args.overrides))
    return config


def _print_plan(config: "ConfigNode", args: argparse.Namespace) -> int:
    from automodel.recipes.plan import make_plan

    for line in make_plan(config, run_dir=args.run_dir).lines():
        say(line)
    return 0


def _set_up(config: "ConfigNode", args: argparse.Namespace, stack: ExitStack) -> "Recipe":
    """Build the job in its folder, which stays locked until `stack` closes."""
    from automodel.observe.run_folder import RunFolder
    from automodel.observe.timeline import Timeline
    from automodel.recipes.sections import find_recipe_class

    recipe: Recipe = find_recipe_class(config)(config, timeline=Timeline(started=args.started))
    if args.run_dir is not None:
        folder = RunFolder(args.run_dir)
    else:
        folder = RunFolder.make_new(Path("runs"), Path(args.recipe).stem)
    stack.enter_context(folder)
    # Closed before the folder is, so that an empty folder for checkpoints does not keep it alive.
    stack.callback(recipe.close)
    say(f"run folder: {folder.path}{' (continued)' if folder.is_continued else ''}")
    recipe.setup(folder)
    return recipe


def _train(recipe: "Recipe", args: argparse.Namespace) -> int:
    """Run the loop. An error that it does not announce is one of the program, and keeps its traceback."""
    from automodel.checkpoint.store import CheckpointSaveError
    from automodel.training.loss import NonFiniteLossError

    try:
        outcome = recipe.run_train_validation_loop()
    except (NonFiniteLossError, CheckpointSaveError) as error:
        return complain(error, status=_FAILED, with_traceback=args.traceback)
    except KeyboardInterrupt:
        second = KeyboardInterrupt("interrupted twice; the last checkpoint is the one before")
        return complain(second, status=_INTERRUPTED, with_traceback=False)
    losses = ", ".join(f"{name} {value:.4f}" for name, value in outcome.losses.items())
    say(f"{outcome.status}: {outcome.steps_run} steps run{', ' + losses if losses else ''}")
    say(f"report: {outcome.report}")
    return 0
