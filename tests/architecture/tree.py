"""The repository as these tests see it."""

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_dalle"


@cache
def project() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file under version control, and new ones that are not ignored; links are files of their own."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(sorted(path for path in paths if path.exists()))


@cache
def modules() -> dict[str, Path]:
    """Import name -> file of every module of the package, those behind the two links included."""
    folders = [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_symlink())]
    files = {file for folder in folders for file in folder.rglob("*.py") if "__pycache__" not in file.parts}
    return {_import_name(file): file for file in sorted(files)}


def syntax(file: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(file.read_text(), filename=str(file))


def _import_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
