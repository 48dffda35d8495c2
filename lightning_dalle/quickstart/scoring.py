"""The stage that draws and judges pictures."""

import dataclasses
import os
from typing import Any

import torch

from lightning_dalle.data.captioned_data_module import CaptionedDataModule
from lightning_dalle.data.captioned_shapes import CaptionedShapes
from lightning_dalle.data.open_moji import OpenMoji
from lightning_dalle.quickstart.judgement import Judgement, Prompts
from lightning_dalle.quickstart.open_moji_scores import judge_open_moji
from lightning_dalle.quickstart.pictures import Models, reconstruct, split_images
from lightning_dalle.quickstart.settings import RunFolder, Sampling, write_json
from lightning_dalle.quickstart.shapes_scores import judge_shapes

NUM_SHOWN = 16
"""Samples and reconstructions in the report."""


def judge(folder: RunFolder, data: CaptionedDataModule, sampling: Sampling) -> None:
    """Draw pictures, measure, and leave pictures and scores in the folder.

    Raises:
        TypeError: If a recipe has other data than OpenMoji or CaptionedShapes.
    """
    models = Models.load(folder)
    if isinstance(data, CaptionedShapes):
        judgement = judge_shapes(models, data, sampling)
    elif isinstance(data, OpenMoji):
        judgement = judge_open_moji(models, data, sampling)
    else:
        raise TypeError(f"data ({type(data).__name__}) must be OpenMoji or CaptionedShapes, which can be judged")
    _save_pictures(folder, models, data, judgement)
    write_json(
        folder.scores,
        {"figures": [dataclasses.asdict(figure) for figure in judgement.figures], "details": judgement.details},
    )


def _save_pictures(folder: RunFolder, models: Models, data: CaptionedDataModule, judgement: Judgement) -> None:
    samples, captions = split_images(data, "train", NUM_SHOWN)
    originals = split_images(data, "val", NUM_SHOWN)[0]
    content = {
        "samples": samples,
        "sample_captions": captions,
        "originals": originals,
        "reconstructions": reconstruct(models.discrete_vae, originals),
        "prompts": [_as_mapping(prompts) for prompts in judgement.prompts],
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
        "marks": prompts.marks,
        "originals": prompts.originals,
    }
