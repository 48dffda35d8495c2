from pathlib import Path

import jupytext
import pytest

from tests.architecture.tree import ROOT, tracked_files

SOURCES = [path for path in tracked_files() if path.parent == ROOT / "notebooks" and path.suffix == ".py"]


def test_every_notebook_is_one_of_a_pair() -> None:
    notebooks = {path.stem for path in tracked_files() if path.suffix == ".ipynb"}
    assert notebooks == {path.stem for path in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_shows_what_its_source_says(source: Path) -> None:
    cells = [[(cell.cell_type, cell.source) for cell in jupytext.read(file).cells] for file in _pair(source)]
    assert cells[0] == cells[1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(source: Path) -> None:
    assert not any(cell.get("outputs") for cell in jupytext.read(source.with_suffix(".ipynb")).cells)


def _pair(source: Path) -> tuple[Path, Path]:
    return source, source.with_suffix(".ipynb")
