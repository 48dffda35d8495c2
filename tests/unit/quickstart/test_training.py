import zipfile
from pathlib import Path

import pytest

from lightning_dalle.quickstart.settings import TRAINED_STAGES, RunFolder, Settings
from lightning_dalle.quickstart.training import data_module, last_checkpoint, recipe_arguments, vocabulary_size

FOLDER = RunFolder("run")


def write_checkpoint(path: Path, whole: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", "content" * 100)
    if not whole:
        path.write_bytes(path.read_bytes()[:50])


def test_a_stage_that_never_started_has_no_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(RunFolder(tmp_path), "contrastive") is None


def test_the_newest_whole_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoints = folder.work("contrastive") / "checkpoints"
    for number, whole in enumerate([True, True, False]):
        write_checkpoint(checkpoints / f"step={number}.ckpt", whole)
    found = last_checkpoint(folder, "contrastive")
    assert found is not None
    assert found.name == "step=1.ckpt"


@pytest.mark.parametrize("stage", TRAINED_STAGES["shapes"])
def test_extra_arguments_stand_above_the_recipe(stage: str) -> None:
    settings = Settings(data="shapes", extra={stage: ["--trainer.max_steps=3"]})
    first, *_, last = recipe_arguments(settings, FOLDER, stage)
    assert first == f"--config={settings.recipe(stage)}"
    assert last == "--trainer.max_steps=3"


def test_the_transformer_is_given_what_the_stages_before_it_left() -> None:
    arguments = recipe_arguments(Settings(data="openmoji"), FOLDER, "text_to_image")
    assert arguments[1:4] == [
        "--model.init_args.tokenizer=run/tokenizer.json",
        "--model.init_args.discrete_vae=run/discrete_vae.ckpt",
        "--data.init_args.tokenizer=run/tokenizer.json",
    ]


@pytest.mark.parametrize("stage", TRAINED_STAGES["shapes"])
def test_the_seed_reaches_weights_data_and_noise_of_each_stage(stage: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    settings = Settings(data="shapes", seed=3, extra={stage: ["--trainer.logger=false"]})
    arguments = [part for part in recipe_arguments(settings, folder, stage) if "tokenizer" not in part]
    parsed = {name: value for name, _, value in (part.partition("=") for part in arguments)}
    assert parsed["--seed_everything"] == parsed["--data.init_args.seed"] == "3"
    # The contrastive module has no randomness of its own.
    assert parsed.get("--model.init_args.training.seed") == (None if stage == "contrastive" else "3")
    assert data_module(settings).seed == 3


@pytest.mark.parametrize("data", TRAINED_STAGES)
def test_recipes_have_room_for_a_tokenizer(data: str) -> None:
    assert vocabulary_size(Settings(data=data)) > 257  # type: ignore[arg-type]
