"""The stage that draws and evaluates pictures."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.emoji.animated import AnimatedEmojiDataModule
from lightning_dalle.data.emoji.openmoji import OpenMojiDataModule
from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.quickstart.evaluation import Evaluation, Prompts
from lightning_dalle.quickstart.picture_scores import evaluate_open_moji, evaluate_shapes
from lightning_dalle.quickstart.pictures import Models, load_final, reconstruct, split_samples
from lightning_dalle.quickstart.settings import RunFolder, Sampling, write_json
from lightning_dalle.quickstart.video_scores import evaluate_animated_emoji, evaluate_moving_shapes

NUM_SHOWN = 16
"""Samples and reconstructions in the report."""


def evaluate(folder: RunFolder, data: CaptionedDataModule, sampling: Sampling) -> None:
    """Draw pictures or clips, measure, and leave them and the scores in the folder.

    Raises:
        TypeError: If a recipe has other data than OpenMojiDataModule, CaptionedShapesDataModule,
            MovingShapesDataModule or AnimatedEmojiDataModule.
    """
    reconstructed: dict[str, Tensor] = {}
    if isinstance(data, MovingShapesDataModule):
        evaluation = evaluate_moving_shapes(load_final(VideoDiTModule, folder, "video_dit"), data, sampling)
    elif isinstance(data, AnimatedEmojiDataModule):
        evaluation = evaluate_animated_emoji(load_final(VideoDiTModule, folder, "video_dit"), data, sampling)
    elif isinstance(data, CaptionedShapesDataModule | OpenMojiDataModule):
        models = Models.load(folder)
        if isinstance(data, CaptionedShapesDataModule):
            evaluation = evaluate_shapes(models, data, sampling)
        else:
            evaluation = evaluate_open_moji(models, data, sampling)
        originals = split_samples(data, "val", NUM_SHOWN)[0]
        reconstructed = {"originals": originals, "reconstructions": reconstruct(models.discrete_vae, originals)}
    else:
        known = "OpenMojiDataModule, CaptionedShapesDataModule, MovingShapesDataModule or AnimatedEmojiDataModule"
        raise TypeError(f"data ({type(data).__name__}) must be {known}, which can be evaluated")
    _save_pictures(folder, data, evaluation, reconstructed)
    write_json(
        folder.scores,
        {"metrics": [dataclasses.asdict(metric) for metric in evaluation.metrics], "details": evaluation.details},
    )


def _save_pictures(
    folder: RunFolder, data: CaptionedDataModule, evaluation: Evaluation, reconstructed: Mapping[str, Tensor]
) -> None:
    samples, captions = split_samples(data, "train", NUM_SHOWN)
    content = {
        "samples": samples,
        "sample_captions": captions,
        **reconstructed,
        "prompts": [_as_mapping(prompts) for prompts in evaluation.prompts],
    }
    unfinished = folder.pictures.with_suffix(".tmp")
    torch.save(content, unfinished)
    os.replace(unfinished, folder.pictures)


def _as_mapping(prompts: Prompts) -> dict[str, Any]:
    """Tensors and plain Python only, for a file that loads without a pickle."""
    return {
        "title": prompts.title,
        "description": prompts.description,
        "captions": prompts.pictures.captions,
        "images": prompts.pictures.images,
        "scores": prompts.pictures.scores,
        "correct": prompts.correct,
        "originals": prompts.originals,
    }
