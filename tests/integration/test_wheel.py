import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT, modules, project

IMPORT_FROM_THE_WHEEL = """
import importlib, sys
from pathlib import Path

where = Path(sys.argv[1])
for name in sys.argv[2].split(","):
    module = importlib.import_module(name)
    assert where in Path(module.__file__).parents, (name, module.__file__)

from lightning_dalle.commands.recipes import packaged_recipes
for name, path in packaged_recipes().items():
    assert where in path.parents and path.read_text(), name
"""


def _run(*command: str, folder: Path, **environment: str) -> str:
    outcome = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the unpacked sdist, as a user's pip may do it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("lightning_dalle", "strategies", "callbacks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", folder=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"{name.replace('.', '/')}.py" for name in modules()}
    expected = {name if not _is_package(name) else name.removesuffix(".py") + "/__init__.py" for name in expected}
    assert sorted(name for name in names if name.endswith(".py")) == sorted(expected)
    assert len(names) == len(set(names))


def test_wheel_holds_recipes_templates_type_marker_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [*PACKAGE.rglob("*.yaml"), *PACKAGE.rglob("*.html"), PACKAGE / "py.typed"]
    data = {path.relative_to(ROOT).as_posix() for path in files}
    assert data <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_packages_of_the_wheel_import_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(site)]
    _run(sys.executable, *install, str(wheel), folder=tmp_path)
    packages = ",".join(project()["tool"]["setuptools"]["packages"])
    _run(sys.executable, "-c", IMPORT_FROM_THE_WHEEL, str(site), packages, folder=empty, PYTHONPATH=str(site))


def _is_package(file_name: str) -> bool:
    return (ROOT / file_name.removesuffix(".py") / "__init__.py").is_file()
