"""Updates of recipes beside products: what is counted and told, without a word on how long anything takes."""

from pathlib import Path

import pytest

from lightning_dalle.commands.recipes import packaged_recipes
from tests.benchmarks import recipe_budgets
from tests.benchmarks.recipe_updates import UpdateTimes, count_operations, small_recipes, train
from tests.foreign_module import LIGHTNING_WARNINGS

pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")]
RECIPE = """
seed_everything: 0
model:
  class_path: DiscreteVAEModule
  init_args:
    network: {image_size: 8, codebook_size: 4, hidden_width: 4, num_groups: 2, patch_codebook: true}
data:
  class_path: CaptionedShapesDataModule
  init_args: {image_size: 8, batch_size: BATCH}
trainer: {gradient_clip_val: 1.0}
"""


def recipe(folder: Path, batch_size: int) -> Path:
    path = folder / f"{batch_size}.yaml"
    path.write_text(RECIPE.replace("BATCH", str(batch_size)))
    return path


def test_each_update_is_timed_with_something_beside_it(tmp_path: Path) -> None:
    runs: list[int] = []
    times = UpdateTimes(lambda: runs.append(1))
    train(recipe(tmp_path, 2), "32-true", 3, [times])
    assert len(times.updates) == len(times.others) == len(runs) == 4
    times.updates, times.others = [9.0, 1.0, 2.0, 4.0], [9.0, 3.0, 5.0, 3.0]
    assert times.medians() == (2.0, 3.0)


def test_operations_grow_with_the_batch(tmp_path: Path) -> None:
    one, two = (count_operations(recipe(tmp_path, size)) for size in (1, 2))
    assert two == 2 * one > 0


def test_the_small_recipes_are_all_but_the_papers() -> None:
    assert {name for name in packaged_recipes() if name not in small_recipes()} == {
        "paper/contrastive",
        "paper/discrete_vae",
        "paper/text_to_image",
    }


def test_a_recipe_above_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_budgets, "RATIOS", {"shapes/some": 2.0})
    assert recipe_budgets.complaint("shapes/some", 2.0 * recipe_budgets.ALLOWANCE) is None
    told = recipe_budgets.complaint("shapes/some", 2.1 * recipe_budgets.ALLOWANCE)
    assert told is not None
    assert told.startswith("shapes/some")
    assert "budget" in told


def test_a_recipe_without_a_budget_is_named() -> None:
    told = recipe_budgets.complaint("shapes/new", 0.1)
    assert told is not None
    assert told.startswith("shapes/new has no budget")
