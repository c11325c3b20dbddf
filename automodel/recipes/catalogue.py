"""The recipes that are shipped, found by name."""

from dataclasses import dataclass
from pathlib import Path

from automodel.config.names import did_you_mean

__all__ = ["ShippedRecipe", "find_recipe", "list_shipped"]

_FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A recipe of ours; `summary` is the first comment line of its file."""

    name: str
    summary: str
    path: Path


def list_shipped() -> list[ShippedRecipe]:
    """Return the shipped recipes in the order of their names."""
    recipes = []
    for path in sorted(_FOLDER.glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        recipes.append(ShippedRecipe(name=path.stem, summary=first_line.lstrip("# "), path=path))
    return recipes


def find_recipe(name: str) -> Path:
    """Return the recipe file that `name` means: a path, or the name of a shipped recipe.

    Raises:
        FileNotFoundError: there is neither; the message gives the nearest shipped name.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {recipe.name: recipe.path for recipe in list_shipped()}
    if name in shipped:
        return shipped[name]
    kind = (
        "recipe file" if path.suffix in {".yaml", ".yml"} or path.parent != Path() else "recipe file or shipped recipe"
    )
    raise FileNotFoundError(f"there is no {kind} {name!r}{did_you_mean(path.stem, shipped)}")
