"""The recipe of the paper's discrete VAE says what the defaults say, and builds."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.lightning_modules.configuration import as_config
from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule, DiscreteVAETrainingConfig
from lightning_dalle.models.discrete_vae import DiscreteVAEConfig


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return yaml.safe_load((files("lightning_dalle") / "recipes/paper/discrete_vae.yaml").read_text())


def test_recipe_is_the_defaults_written_out(recipe: dict[str, Any]) -> None:
    arguments = recipe["model"]["init_args"]
    assert as_config(DiscreteVAEConfig, arguments["network"], "network") == DiscreteVAEConfig()
    assert as_config(DiscreteVAETrainingConfig, arguments["training"], "training") == DiscreteVAETrainingConfig()


def test_recipe_has_the_batch_of_the_paper(recipe: dict[str, Any]) -> None:
    trainer, data = recipe["trainer"], recipe["data"]["init_args"]
    assert trainer["devices"] * trainer["num_nodes"] * data["batch_size"] == 512
    assert trainer["max_steps"] == 3_000_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recipe_builds_from_the_command_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Image.new("RGB", (300, 300)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a black square of black wool")
    here = ["accelerator=cpu", "devices=1", "num_nodes=1", "precision=32-true", "logger=false"]
    with torch.device("meta"):
        command = SuiteCLI(
            [
                "--config",
                "paper/discrete_vae",
                f"--data.path={tmp_path}",
                *(f"--trainer.{setting}" for setting in here),
            ],
            run=False,
        )
    assert isinstance(command.model, DiscreteVAEModule)
    assert sum(parameter.numel() for parameter in command.model.parameters()) == 53_786_240 + 43_829_766
    assert command.trainer.max_steps == 3_000_000
