"""Recipes by name: those of the package, and a user's own by their paths."""

from importlib.resources import as_file, files
from pathlib import Path


def packaged_recipes() -> dict[str, Path]:
    """Name, as `shapes/discrete_vae`, -> file of every recipe that comes with the package."""
    with as_file(files("lightning_dalle") / "recipes") as folder:
        return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: `name` as a path, else the packaged recipe of that name.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    recipes = packaged_recipes()
    if name.removesuffix(".yaml") in recipes:
        return recipes[name.removesuffix(".yaml")]
    raise FileNotFoundError(f"config ({name}) must be a file or a recipe of the package, one of {', '.join(recipes)}")
