"""Contrastive modules and callbacks from YAML, as the command reads them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lightning_dalle.callbacks import CLIPReranking, ImageGenerationMetrics
from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from lightning_dalle.models.contrastive import ContrastiveConfig
from tests.foreign_module import QUIET

CAPTIONS = ["a red diamond", "a blue square"]


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    network = ContrastiveConfig(image_size=32, embed_dim=8, vision_width=4, text_width=8, text_heads=1)
    tokenizer = CaptionTokenizer.train(CAPTIONS, vocabulary_size=270)
    trainer = Trainer(**QUIET)
    trainer.strategy.connect(ContrastiveModule(network, tokenizer=tokenizer.to_json()))
    trainer.save_checkpoint(tmp_path / "contrastive.ckpt")
    return tmp_path / "contrastive.ckpt"


def test_callbacks_are_built_from_yaml_with_the_scorer_of_a_checkpoint(scorer: Path, tmp_path: Path) -> None:
    reranking = {
        "class_path": "CLIPReranking",
        "init_args": {
            "captions": CAPTIONS,
            "scorer": {"class_path": "lightning_dalle.ContrastiveModule", "init_args": {"network": str(scorer)}},
            "num_candidates": 4,
            "keep": 2,
            "generate_options": {"temperature": 0.9},
        },
    }
    metrics = {"class_path": "ImageGenerationMetrics", "init_args": {"features": "effnet_lite0", "num_images": 8}}
    trainer: dict[str, Any] = {**QUIET, "callbacks": [reranking, metrics]}
    network = {"image_size": 32, "hidden_width": 8, "codebook_size": 8, "decoder_input_width": 8}
    model = {"class_path": "DiscreteVAEModule", "init_args": {"network": network}}
    recipe = {"model": model, "data": {"class_path": "CaptionedShapesDataModule"}, "trainer": trainer}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    built = SuiteCLI(["--config", str(tmp_path / "recipe.yaml")], run=False)
    callbacks = {type(callback): callback for callback in vars(built.trainer)["callbacks"]}
    loaded = callbacks[CLIPReranking].scorer
    assert isinstance(loaded, ContrastiveModule)
    weights = torch.load(scorer, weights_only=True)["state_dict"]
    torch.testing.assert_close(dict(loaded.state_dict()), weights, rtol=0, atol=0)
    assert callbacks[ImageGenerationMetrics].extractor.name == "effnet_lite0"


def test_paper_recipe_builds_clip_of_the_paper_s_size(tmp_path: Path) -> None:
    here = [f"--data.path={tmp_path}", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    quiet = ["--trainer.logger=false", "--trainer.callbacks=null", "--trainer.precision=32"]
    with torch.device("meta"):
        built = SuiteCLI(["--config", "paper/contrastive", *here, *quiet], run=False)
    assert isinstance(built.model, ContrastiveModule)
    assert sum(parameter.numel() for parameter in built.model.parameters()) == 427_616_513
