"""The recipe of moving shapes: its parts fit together, and its arithmetic is what it says."""

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule

TOKENIZER = CaptionTokenizer.train(["a red square moving left slowly"], vocabulary_size=300)


@pytest.fixture
def recipe() -> dict[str, Any]:
    return yaml.safe_load((files("lightning_dalle") / "recipes/moving_shapes/video_dit.yaml").read_text())


def test_recipe_builds_through_the_command_line(recipe: dict[str, Any], tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    # Any data module will do: the clips are of no account here.
    recipe["data"] = {"class_path": "CaptionedShapesDataModule"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["--config", str(tmp_path / "recipe.yaml"), f"--model.tokenizer={tmp_path / 'tokenizer.json'}"]
    policies = ["riflex", "default", {"kind": "yarn", "fast_rotations": 2}]
    built = SuiteCLI([*arguments, f"--model.network.rotary.policies={policies}", "--trainer.logger=false"], run=False)
    assert isinstance(built.model, VideoDiTModule)
    assert [policy.kind for policy in built.model.network.config.rotary.policies] == ["riflex", "default", "yarn"]


def test_recipe_s_arithmetic(recipe: dict[str, Any]) -> None:
    parts = recipe["model"]["init_args"]
    module = VideoDiTModule(**parts, tokenizer=TOKENIZER.to_json())
    config, data = module.network.config, recipe["data"]["init_args"]
    assert module.training_config.clip_size == (data["frames"], data["height"], data["width"])
    tokens = math.prod(config.rotary.original_max_position_embeddings)
    per_clip = tokens * config.depth * (84 * config.width**2 + 12 * tokens * config.width)
    assert per_clip == pytest.approx(1.2e9, rel=0.05)
    assert recipe["trainer"]["max_steps"] == parts["training"]["schedule"]["total_steps"]
