import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copy_of_the_tree(tmp_path: Path) -> Path:
    """The package with its links, which still point to the folders beside it."""
    for name in ("lightning_dalle", "strategies", "callbacks"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("callbacks/wrong.py", "import lightning_dalle.cli", "Imports run down only"),
        ("strategies/wrong.py", "from lightning_dalle.lightning_modules import anything", "Imports run down only"),
        ("lightning_dalle/ops/wrong.py", "import lightning.pytorch", "No Lightning below the data modules"),
        ("lightning_dalle/data/wrong.py", "import pytorch_lightning", "One Lightning"),
        ("lightning_dalle/fresh/__init__.py", "", "Imports run down only"),
    ],
)
def test_contracts_see_a_wrong_import_everywhere(copy_of_the_tree: Path, file: str, line: str, contract: str) -> None:
    (copy_of_the_tree / file).parent.mkdir(exist_ok=True)
    (copy_of_the_tree / file).write_text(line + "\n")
    outcome = _lint_imports(copy_of_the_tree)
    broken = [report for report in outcome.stdout.splitlines() if report.endswith("BROKEN")]
    assert outcome.returncode != 0
    assert any(report.startswith(contract) for report in broken), outcome.stdout
