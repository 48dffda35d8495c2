import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys

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

# argv: names that cannot be imported, then modules to import.
IMPORT_EVERYTHING = """
import importlib, sys

blocked = set(sys.argv[1].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def _run(code: str, *arguments: str) -> None:
    outcome = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
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


def _import_names(distributions: set[str]) -> set[str]:
    return {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if {_canonical(owner) for owner in owners} & distributions
    }


def test_importing_the_package_alone_is_light() -> None:
    _run(IMPORT_WITHOUT_HEAVY_ONES)


def test_every_module_imports_with_the_required_dependencies_only() -> None:
    required = _distributions_of(project()["project"]["dependencies"]) | {"lightning-dalle"}
    everything = {
        _canonical(name) for owners in importlib.metadata.packages_distributions().values() for name in owners
    }
    blocked = _import_names(everything - required) - _import_names(required)
    assert {"webdataset", "emoji", "resvg_py", "torch_fidelity", "beartype"} <= blocked
    _run(IMPORT_EVERYTHING, ",".join(sorted(blocked)), ",".join(modules()))


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
