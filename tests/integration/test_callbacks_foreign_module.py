"""The callbacks in a project that uses nothing else of the package: its own module and any logger."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_dalle.callbacks import CLIPReranking, ImageGenerationMetrics
from tests.foreign_module import LIGHTNING_WARNINGS, Brightness, MeanColour, Painter, fit
from tests.offline_wandb import offline_wandb

pytestmark = LIGHTNING_WARNINGS
PROMPTS = ["light", "grey", "dark"]


def _callbacks(folder: Path) -> tuple[CLIPReranking, ImageGenerationMetrics]:
    reranking = CLIPReranking(PROMPTS, Brightness(), num_candidates=4, keep=2)
    return reranking, ImageGenerationMetrics(MeanColour(), num_images=4, max_batch=2, cache_folder=folder)


def test_every_logger_gets_figures_and_pictures(tmp_path: Path) -> None:
    with offline_wandb():
        wandb_logger = WandbLogger(offline=True, save_dir=tmp_path)
        loggers = [
            CSVLogger(tmp_path, name="csv", version=0),
            TensorBoardLogger(tmp_path, name="tensorboard", version=0),
            wandb_logger,
        ]
        trainer = fit(Painter(), list(_callbacks(tmp_path)), logger=loggers, log_every_n_steps=1, max_epochs=2)
        summary = dict(wandb_logger.experiment.summary)
        wandb_logger.experiment.finish()
    metrics = {"val/reranking_best_score", "val/fd_mean_colour", "val/kd_mean_colour", "val/num_scored_images"}
    assert metrics <= set(trainer.callback_metrics)
    assert metrics <= set((tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()[0].split(","))
    assert sorted(path.name for path in (tmp_path / "csv/version_0/images").glob("*.png")) == [
        "val-reranked-3.png",
        "val-reranked-6.png",
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard/version_0")).Reload()
    assert metrics <= set(events.Tags()["scalars"])
    assert [image.step for image in events.Images("val/reranked")] == [3, 6]
    assert metrics <= set(summary)
    assert len(list(tmp_path.rglob("media/images/val/reranked_*.png"))) == 2


def test_scores_can_choose_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/fd_mean_colour", filename="best")
    callbacks = [checkpoint, *_callbacks(tmp_path)]
    fit(Painter(), callbacks, max_epochs=2, enable_checkpointing=True)
    assert checkpoint.best_model_score is not None
    loaded = torch.load(checkpoint.best_model_path, weights_only=True)
    assert loaded["callbacks"]["CLIPReranking"] == {"num_validations": loaded["epoch"] + 1}
