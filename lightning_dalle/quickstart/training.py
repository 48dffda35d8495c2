"""Stages of training: the package's recipes through the command line's own classes, with paths filled in."""

import dataclasses
import json
import logging
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import wandb
import yaml

from lightning_dalle.commands.tokenizer import vocabulary_size_of_recipe
from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.quickstart.expected_time import Pace
from lightning_dalle.quickstart.machine import training_precision
from lightning_dalle.quickstart.settings import RunFolder, Settings

CHECKPOINT_INTERVAL = 50
"""Updates that an interruption loses at most."""


def train_tokenizer(settings: Settings, folder: RunFolder) -> None:
    """Learn merges from the training captions, as many as the transformer's vocabulary has room for."""
    # Any size will do: these captions have fewer words than a recipe of this size has room for.
    tokenizer = CaptionTokenizer.train(data_module(settings).captions("train"), vocabulary_size(settings))
    unfinished = folder.tokenizer.with_suffix(".tmp")
    tokenizer.save(unfinished)
    os.replace(unfinished, folder.tokenizer)


def train(settings: Settings, folder: RunFolder, stage: str, title: str, pace: Pace, later_seconds: float) -> None:
    """Run a recipe, from its last checkpoint if there is one, and leave the final weights.

    Args:
        title: Title of the progress bar.
        pace: Pace of the stage, for the remaining time.
        later_seconds: Estimate of what the stages after this one take, for the remaining time.
    """
    with quiet():
        wandb.setup(wandb.Settings(silent=True, mode="offline"))
        try:
            cli = SuiteCLI(_fit_arguments(settings, folder, stage, title, pace, later_seconds))
        finally:
            wandb.finish()
        unfinished = folder.work(stage) / "final.tmp"
        cli.trainer.save_checkpoint(unfinished, weights_only=True)
    os.replace(unfinished, folder.checkpoint(stage))
    shutil.rmtree(folder.work(stage) / "checkpoints", ignore_errors=True)


def recipe_arguments(settings: Settings, folder: RunFolder, stage: str) -> list[str]:
    """Return what a stage adds to its recipe: the results of the stages before it."""
    tokenizer, discrete_vae = folder.tokenizer, folder.checkpoint("discrete_vae")
    filled_in = {
        "discrete_vae": [],
        "contrastive": [f"--model.init_args.tokenizer={tokenizer}"],
        "text_to_image": [
            f"--model.init_args.tokenizer={tokenizer}",
            f"--model.init_args.discrete_vae={discrete_vae}",
            f"--data.init_args.tokenizer={tokenizer}",
        ],
        "video_dit": [f"--model.init_args.tokenizer={tokenizer}"],
    }
    seeds = [f"--seed_everything={settings.seed}", f"--data.init_args.seed={settings.seed}"]
    if stage != "contrastive":
        # Its training draws nothing of its own.
        seeds.append(f"--model.init_args.training.seed={settings.seed}")
    return [f"--config={settings.recipe(stage)}", *filled_in[stage], *seeds, *settings.extra.get(stage, [])]


def data_module(settings: Settings) -> CaptionedDataModule:
    """Return the data of the recipes."""
    first = settings.trained_stages[0]
    seed = f"--data.init_args.seed={settings.seed}"
    arguments = [f"--config={settings.recipe(first)}", seed, *settings.extra.get(first, [])]
    with quiet():
        data: CaptionedDataModule = _DataCLI([*arguments, "--trainer.logger=false"], run=False).datamodule
    data.prepare_data()
    return data


def last_checkpoint(folder: RunFolder, stage: str) -> Path | None:
    """Return the newest whole checkpoint of an interrupted stage.

    A file may be truncated where temporary files live on another disk and the machine stopped while one was copied.
    """
    found = sorted((folder.work(stage) / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return next((path for path in reversed(found) if zipfile.is_zipfile(path)), None)


def updates_done(folder: RunFolder, stage: str) -> int:
    """Updates that an interrupted stage does not repeat."""
    checkpoint = last_checkpoint(folder, stage)
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])


def vocabulary_size(settings: Settings) -> int:
    """Ids that the recipe's transformer has room for."""
    recipe = settings.recipe(settings.trained_stages[-1])
    return vocabulary_size_of_recipe(yaml.safe_load(recipe.read_text(encoding="utf-8")))


def _fit_arguments(
    settings: Settings, folder: RunFolder, stage: str, title: str, pace: Pace, later_seconds: float
) -> list[str]:
    work = folder.work(stage)
    wandb_run = {"name": stage, "group": folder.group, "project": "lightning-dalle", "offline": True}
    loggers = [
        # A row is on disk as soon as it is logged, so that the curve of a killed attempt is whole.
        _configured("CSVLogger", save_dir=str(work), name="logs", flush_logs_every_n_steps=1),
        _configured("WandbLogger", save_dir=str(folder.path), **wandb_run),
    ]
    callbacks = [
        _configured(
            "lightning_dalle.quickstart.progress.StageProgressBar",
            title=title,
            pace=dataclasses.asdict(pace),
            later_seconds=later_seconds,
        ),
        _configured(
            "ModelCheckpoint",
            dirpath=str(work / "checkpoints"),
            filename="{step}",
            every_n_train_steps=CHECKPOINT_INTERVAL,
        ),
    ]
    resumed = last_checkpoint(folder, stage)
    return [
        "fit",
        f"--trainer.precision={training_precision()}",
        *recipe_arguments(settings, folder, stage),
        f"--trainer.default_root_dir={work}",
        f"--trainer.logger={json.dumps(loggers)}",
        *(f"--trainer.callbacks+={json.dumps(callback)}" for callback in callbacks),
        "--trainer.enable_model_summary=false",
        *([] if resumed is None else [f"--ckpt_path={resumed}"]),
    ]


def _configured(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


class _DataCLI(SuiteCLI):
    """Builds the data module without the model, which may need what is still to be trained."""

    def instantiate_classes(self) -> None:
        """Build what does not depend on earlier stages."""
        self.config.model = None
        super().instantiate_classes()


@contextmanager
def quiet() -> Iterator[None]:
    """Leave the console to the progress bars; what goes wrong is still raised."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("fabric", "pytorch")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        # They advise on speed and logging, note that a resumed run finds its own files, or are for Lightning's authors.
        for category in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
