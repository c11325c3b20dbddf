"""`automodel recipes`: list the recipes that are shipped."""

import argparse

from automodel.recipes.catalogue import list_shipped

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--paths", action="store_true", help="also print where each recipe's file is")


def run(args: argparse.Namespace) -> int:
    """Print names and summaries; returns the exit status."""
    recipes = list_shipped()
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:<{width}}  {recipe.summary}")
        if args.paths:
            print(f"{'':<{width}}  {recipe.path}")
    return 0
