import json
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy
from PIL import Image

import lightning_dalle
from lightning_dalle import ContrastiveModule, DiscreteVAEModule, TextToImageModule, cli
from lightning_dalle.commands.recipes import find_recipe, packaged_recipes
from lightning_dalle.commands.sample import rank_best_first
from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.tokenizer import CaptionTokenizer

SIZE, STRIDE, CODES, WORDS, TEXT_TOKENS = 32, 8, 16, 300, 16
DATA = {
    "class_path": "CaptionedShapesDataModule",
    "init_args": {"image_size": SIZE, "num_train": 8, "num_val": 4, "batch_size": 4, "text_tokens": TEXT_TOKENS},
}
TRAINER = {
    "accelerator": "cpu",
    "max_steps": 2,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
DISCRETE_VAE = {
    "class_path": "DiscreteVAEModule",
    "init_args": {
        "network": {"image_size": SIZE, "codebook_size": CODES, "hidden_width": 8, "decoder_input_width": 8},
        "training": {"schedule": {"total_steps": 1, "final_learning_rate": 1e-3}},
    },
}
TEXT_TO_IMAGE = {
    "class_path": "lightning_dalle.lightning_modules.text_to_image_module.TextToImageModule",
    "init_args": {
        "network": {
            "depth": 2,
            "num_heads": 1,
            "head_dim": 8,
            "text_tokens": TEXT_TOKENS,
            "text_vocabulary_size": WORDS,
            "grid_height": SIZE // STRIDE,
            "grid_width": SIZE // STRIDE,
            "image_vocabulary_size": CODES,
        },
        "training": {"schedule": {"warmup_steps": 1}},
    },
}
CONTRASTIVE = {
    "class_path": "ContrastiveModule",
    "init_args": {
        "network": {"image_size": SIZE, "embed_dim": 8, "vision_width": 8, "text_width": 8, "text_heads": 1},
        "training": {"schedule": {"warmup_steps": 1, "total_steps": 10}},
    },
}


def run(*arguments: object) -> None:
    """The command, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-dalle", *map(str, arguments)])
        cli.main()


def write_recipe(path: Path, model: dict[str, Any], **trainer: Any) -> Path:
    settings = {**TRAINER, "default_root_dir": str(path.with_suffix("")), **trainer}
    path.write_text(yaml.safe_dump({"seed_everything": 1, "model": model, "data": DATA, "trainer": settings}))
    return path


def checkpoint_of(folder: Path) -> Path:
    return max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage was trained for two steps by the command."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder / "text_to_image.yaml", TEXT_TO_IMAGE)
    run("tokenizer", "--config", recipe, "--output", folder / "tokenizer.json")
    run("fit", "--config", write_recipe(folder / "discrete_vae.yaml", DISCRETE_VAE))
    tokenizer = ("--data.tokenizer", folder / "tokenizer.json", "--model.tokenizer", folder / "tokenizer.json")
    run("fit", "--config", recipe, *tokenizer, "--model.discrete_vae", checkpoint_of(folder / "discrete_vae"))
    run("fit", "--config", write_recipe(folder / "contrastive.yaml", CONTRASTIVE), *tokenizer[2:])
    return folder


def test_tokenizer_takes_the_vocabulary_that_the_model_has_room_for(trained: Path) -> None:
    assert 257 < CaptionTokenizer.from_file(trained / "tokenizer.json").vocabulary_size <= WORDS


@pytest.mark.parametrize(
    ("stage", "module_class"),
    [("discrete_vae", DiscreteVAEModule), ("text_to_image", TextToImageModule), ("contrastive", ContrastiveModule)],
)
def test_checkpoint_of_the_command_holds_tensors_and_plain_python(
    trained: Path, stage: str, module_class: type[Any]
) -> None:
    checkpoint = checkpoint_of(trained / stage)
    content = torch.load(checkpoint, weights_only=True)
    assert content["global_step"] == 2
    assert not any(name.startswith("_") for name in content["hyper_parameters"])
    module = module_class.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    assert module.hparams.network == content["hyper_parameters"]["network"]


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_a_run_resumes_and_writes_over_the_saved_configuration(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "discrete_vae.yaml", DISCRETE_VAE)
    fit = ("fit", "--config", recipe, "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}")
    for steps in (1, 3):
        resume = ("--ckpt_path", checkpoint_of(tmp_path)) if steps > 1 else ()
        run(*fit, "--trainer.logger.version=0", "--trainer.max_steps", steps, *resume)
        assert torch.load(checkpoint_of(tmp_path), weights_only=True)["global_step"] == steps
    (saved,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["max_steps"] == 3


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_trained_text_to_image_module_is_evaluated_from_its_checkpoint(
    trained: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ("--data.tokenizer", trained / "tokenizer.json", "--model.tokenizer", trained / "tokenizer.json")
    vae = ("--model.discrete_vae", checkpoint_of(trained / "discrete_vae"))
    limits = ("--trainer.limit_test_batches", 1, "--trainer.limit_predict_batches", 1)
    checkpoint = ("--ckpt_path", checkpoint_of(trained / "text_to_image"))
    run(command, "--config", trained / "text_to_image.yaml", *tokenizer, *vae, *limits, *checkpoint)
    assert command == "predict" or "loss" in capsys.readouterr().out


def test_sample_draws_ranks_and_saves(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captions = ["a large red diamond", "a small blue square"]
    command = ("sample", "--checkpoint", checkpoint_of(trained / "text_to_image"), "--captions", *captions)
    ranked = ("--reranker", checkpoint_of(trained / "contrastive"))
    run(*command, *ranked, "--num-candidates", 3, "--output", tmp_path, "--device", "cpu")
    assert str(tmp_path / "grid.png") in capsys.readouterr().out
    rows = json.loads((tmp_path / "samples.json").read_text())
    assert [row["caption"] for row in rows] == captions
    assert all(row["scores"] == sorted(row["scores"], reverse=True) and len(row["scores"]) == 3 for row in rows)
    padding = 2
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (3 * (SIZE + padding) + padding, 2 * (SIZE + padding) + padding)


def test_sample_without_reranker_keeps_the_order_of_drawing(trained: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(trained / "text_to_image")
    for output in ("first", "second"):
        draw = ("--captions", "a large red diamond", "--num-candidates", 2, "--seed", 5, "--device", "cpu")
        run("sample", "--checkpoint", checkpoint, *draw, "--output", tmp_path / output)
    assert json.loads((tmp_path / "first" / "samples.json").read_text()) == [{"caption": "a large red diamond"}]
    assert (tmp_path / "first" / "grid.png").read_bytes() == (tmp_path / "second" / "grid.png").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--reranker", "DISCRETE_VAE"), r"--reranker: .* is no checkpoint of a ContrastiveModule"),
        (("--reranker", "TEXT"), r"--reranker: .* is no checkpoint of a ContrastiveModule"),
        (("--checkpoint", "DISCRETE_VAE"), r"--checkpoint: .* is no checkpoint of a TextToImageModule"),
        (("--output", "TEXT"), r"--output: .* cannot be a folder"),
        (("--device", "nosuch"), r"--device: 'nosuch' cannot be used"),
        (("--seed", str(10**30)), r"--seed: 10+ must be a number of 64 bits"),
    ],
)
def test_sample_says_what_is_wrong_before_it_draws(
    wrong: tuple[str, str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("not a checkpoint")
    files = {"DISCRETE_VAE": checkpoint_of(trained / "discrete_vae"), "TEXT": tmp_path / "text"}
    options = {
        "--checkpoint": checkpoint_of(trained / "text_to_image"),
        "--output": tmp_path / "samples",
        "--device": "cpu",
        wrong[0]: files.get(wrong[1], wrong[1]),
    }
    with pytest.raises(SystemExit) as stop:
        run("sample", "--captions", "red", *(part for option in options.items() for part in option))
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert re.search(message, shown.err.replace("\n", " "))
    assert "Drawing" not in shown.out + shown.err


def test_ranking_is_stable_among_equal_scores() -> None:
    images = torch.arange(4, dtype=torch.uint8).reshape(1, 4, 1, 1, 1).expand(1, 4, 3, 1, 1)
    ranked, scores = rank_best_first(images, torch.tensor([[0.1, 0.7, 0.1, 0.9]]))
    assert ranked[0, :, 0, 0, 0].tolist() == [3, 1, 0, 2]
    torch.testing.assert_close(scores, torch.tensor([[0.9, 0.7, 0.1, 0.1]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dream"], "unknown command 'dream'; it is one of fetch, fit, predict, quickstart, sample"),
        (["fit", "--config", "shapes/nothing"], r"config (shapes/nothing) must be a file or a recipe of the package"),
        (["fit", "--config=shapes/nothing"], r"config (shapes/nothing) must be a file or a recipe of the package"),
        (["tokenizer", "--config", "nothing"], "config (nothing) must be a file or a recipe of the package"),
        (["sample", "--checkpoint", "none.ckpt", "--captions", "a"], "--checkpoint: there is no file none.ckpt"),
        (["fit", "--config", "shapes/discrete_vae", "--model.network.codebook_sizes", "9"], "codebook_sizes"),
        (
            ["fit", "--config", "shapes/discrete_vae", "--model.network.codebook_size", "many"],
            "network.codebook_size ('many')",
        ),
        (["fit", "--config", "shapes/discrete_vae", "--model.network.codebook_size", "-1"], "codebook_size (-1)"),
        (["fit", "--config", "shapes/discrete_vae", "--data.batch_size", "0"], "batch_size (0)"),
        (["fit", "--config", "shapes/discrete_vae", "--data.batches", "3"], "batches"),
        (["fit", "--config", "shapes/discrete_vae", "--trainer.max_step", "3"], "max_step"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_command_line_names_the_argument(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_tokenizer_needs_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").write_text("model: {}\n")
    with pytest.raises(SystemExit):
        run("tokenizer", "--config", tmp_path / "empty.yaml")
    assert "config must have a section `data`" in capsys.readouterr().err


def test_tokenizer_refuses_a_vocabulary_without_room_for_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "text_to_image.yaml", TEXT_TO_IMAGE)
    with pytest.raises(SystemExit):
        run("tokenizer", "--config", recipe, "--vocabulary-size", 5)
    assert "vocabulary_size (5) must be at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    "strategy",
    [("--trainer.strategy=ddp_find_unused_parameters_true",), ("--trainer.strategy.class_path=DDPStrategy",)],
)
def test_strategy_is_a_registered_name_or_a_class_path(strategy: tuple[str, ...], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "discrete_vae.yaml", DISCRETE_VAE, logger=False)
    built = SuiteCLI(["--config", str(recipe), *strategy], run=False)
    assert isinstance(built.trainer.strategy, DDPStrategy)
    assert isinstance(built.model, DiscreteVAEModule)


def test_recipe_is_found_by_name_with_or_without_its_ending() -> None:
    for name, path in packaged_recipes().items():
        assert find_recipe(name) == find_recipe(f"{name}.yaml") == find_recipe(str(path)) == path


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_lists_commands_and_recipes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(*arguments)
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli._MODULE_OF)
    assert all(f"\n  {name}\n" in text for name in packaged_recipes())


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ("quickstart", "--data"),
        ("sample", "--num-candidates"),
        ("tokenizer", "--vocabulary-size"),
        ("fit", "--trainer"),
    ],
)
def test_every_command_explains_its_arguments(command: str, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    assert argument in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run("--version")
    assert capsys.readouterr().out == f"{lightning_dalle.__version__}\n"


def test_help_is_quick_as_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from lightning_dalle.cli import main; main(); assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert time.monotonic() - started < 5


def test_module_runs_as_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_dalle.cli", "--version"])
    runpy.run_path(cli.__file__, run_name="__main__")
    assert capsys.readouterr().out == f"{lightning_dalle.__version__}\n"
