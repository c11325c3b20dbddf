"""`automodel run RECIPE`: train, or print what would be trained."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automodel.cli.complaints import complain
from automodel.cli.output import say
from automodel.cli.rank_run import INTERRUPTED, USAGE_ERROR, RankRun

if TYPE_CHECKING:
    from automodel.config.loader import ConfigNode
    from automodel.distributed.env import LaunchEnvironment

__all__ = ["add_arguments", "run"]

_OPTIONS = ("dry-run", "run-dir", "nproc-per-node", "traceback")


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
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N processes on this machine as ranks of one job (default: those that torchrun or Slurm started)",
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")


def run(args: argparse.Namespace) -> int:
    """Train, in this process or in several, or print the plan; returns the exit status."""
    from automodel.distributed.env import read_launch_environment

    try:
        launch = read_launch_environment()
    except ValueError as error:
        return complain(error, status=USAGE_ERROR, with_traceback=args.traceback)
    try:
        processes = _count_processes(args.nproc_per_node, launch)
    except ValueError as error:
        # The processes of one machine make the same mistake.
        return (
            complain(error, status=USAGE_ERROR, with_traceback=args.traceback)
            if launch.local_rank == 0
            else USAGE_ERROR
        )
    if args.dry_run:
        return _print_plan(args, processes) if launch.rank == 0 else 0
    if processes > 1 and launch.launcher is None:
        return _start_ranks(args, processes)
    return RankRun(args, launch).run(lambda: _load(args))


def _count_processes(wanted: int | None, launch: "LaunchEnvironment") -> int:
    """Return the number of ranks of the job.

    Raises:
        ValueError: --nproc-per-node is not positive, or a launcher has started another number of processes.
    """
    if wanted is None:
        return launch.world_size
    if wanted < 1:
        raise ValueError(f"--nproc-per-node must be positive, got {wanted}")
    if launch.launcher is None:
        return wanted
    if wanted != launch.local_world_size:
        here = "" if launch.local_world_size is None else f", {launch.local_world_size} on this machine"
        raise ValueError(
            f"--nproc-per-node {wanted} is not what {launch.launcher} has started: its variables make this process "
            f"rank {launch.rank} of {launch.world_size}{here}; leave the option out"
        )
    return launch.world_size


def _start_ranks(args: argparse.Namespace, processes: int) -> int:
    """Run the same command in several processes on this machine, once its words are known to be right."""
    try:
        _load(args)
        from automodel.distributed.launcher import launch_ranks

        outcome = launch_ranks(args.words, processes=processes)
    except KeyboardInterrupt:
        return complain(KeyboardInterrupt("interrupted"), status=INTERRUPTED, with_traceback=False)
    except Exception as error:  # noqa: BLE001 - a border: the recipe cannot be read, or no process started
        return complain(error, status=USAGE_ERROR, with_traceback=args.traceback)
    if outcome.message is not None:
        complain(RuntimeError(outcome.message), status=outcome.status, with_traceback=None)
    return outcome.status


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
    from automodel.recipes.catalogue import find_recipe

    _refuse_misspelt_options(args.overrides)
    config = load_yaml_config(find_recipe(args.recipe))
    apply_overrides(config, parse_overrides(args.overrides))
    return config


def _print_plan(args: argparse.Namespace, processes: int) -> int:
    try:
        config = _load(args)
        with config.hiding_values():
            from automodel.recipes.plan import make_plan

            for line in make_plan(config, run_dir=args.run_dir, world_size=processes).lines():
                say(line)
    except KeyboardInterrupt:
        return complain(KeyboardInterrupt("interrupted"), status=INTERRUPTED, with_traceback=False)
    except Exception as error:  # noqa: BLE001 - a border: every error of a plan is about its recipe
        return complain(error, status=USAGE_ERROR, with_traceback=args.traceback)
    return 0
