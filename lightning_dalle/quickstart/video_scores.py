"""Evaluation of the video recipes."""

import random

import torch
from jaxtyping import UInt8
from torch import Tensor

from lightning_dalle.data.emoji.animated import AnimatedEmojiDataModule
from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.data.moving_shapes.oracle import attribute_shares, matches_each
from lightning_dalle.evaluation.clip_features import frame_difference
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.quickstart.evaluation import Evaluation, EvaluationMetric, Prompts
from lightning_dalle.quickstart.pictures import draw_clips, split_samples, training_prompts
from lightning_dalle.quickstart.settings import Sampling

AGREEMENT_TARGET = 0.5


def motion_metrics(
    generated: UInt8[Tensor, "generated 3 frames height width"], real: UInt8[Tensor, "real 3 frames height width"]
) -> list[EvaluationMetric]:
    """Return the ratio of the mean frame differences, and how near it is to 1 from either side."""
    ratio = float(frame_difference(generated).mean() / frame_difference(real).mean())
    n = len(generated)
    return [
        EvaluationMetric(
            key="motion_ratio",
            label="Motion, sampled to real",
            definition="Mean difference of neighbouring frames in sampled clips, over that in real clips.",
            value=ratio,
            n=n,
        ),
        EvaluationMetric(
            key="motion_agreement",
            label="Motion, smaller to larger",
            definition="The ratio above or its inverse, whichever is below 1: 0.5 is a factor of 2.",
            value=min(ratio, 1 / ratio) if ratio > 0 else 0.0,
            n=n,
            target=AGREEMENT_TARGET,
        ),
    ]


TARGETS = {"colour": 0.95, "shape": 0.9, "axis": 0.85}
_LABELS = {
    "colour": "colour",
    "shape": "shape",
    "axis": "axis of motion",
    "direction": "direction (axis and sign)",
    "speed": "speed",
}
NUM_REAL_CLIPS = 200


def evaluate_moving_shapes(module: VideoDiTModule, data: MovingShapesDataModule, sampling: Sampling) -> Evaluation:
    """Measure clips of held-out captions, and how much moves in them."""
    evaluation = Evaluation()
    captions = data.held_out_captions()
    captions = random.Random(sampling.seed).sample(captions, min(sampling.num_prompts, len(captions)))
    drawn = draw_clips(module, captions, sampling)
    flat, repeated = drawn.images.flatten(0, 1), drawn.repeated_captions
    correct = matches_each(flat, repeated)
    shares = {**attribute_shares(flat, repeated), "all": float(correct.double().mean())}
    evaluation.metrics += [_share_figure(name, share, len(flat)) for name, share in shares.items()]
    evaluation.metrics += motion_metrics(flat, split_samples(data, "val", NUM_REAL_CLIPS)[0])
    description = (
        "Colour, shape, direction and speed of each caption never met in training. A mark tells whether the oracle "
        "reads all four back from the clip."
    )
    evaluation.prompts.append(
        Prompts("Held-out captions", description, drawn, correct.unflatten(0, drawn.images.shape[:2]))
    )
    return evaluation


def _share_figure(name: str, share: float, num_clips: int) -> EvaluationMetric:
    what = "the whole caption" if name == "all" else f"the caption's {_LABELS[name]}"
    return EvaluationMetric(
        key=f"oracle_{name}",
        label="Held-out captions: " + ("all of it" if name == "all" else _LABELS[name]),
        definition=f"Share of all sampled clips from which the oracle reads {what}.",
        value=share,
        n=num_clips,
        target=TARGETS.get(name),
        unit="%",
    )


def evaluate_animated_emoji(module: VideoDiTModule, data: AnimatedEmojiDataModule, sampling: Sampling) -> Evaluation:
    """Measure clips of training captions: whether they are the emoji that was asked for, and whether they move."""
    clips, all_captions = split_samples(data, "all")
    captions = training_prompts(data, sampling)
    drawn = draw_clips(module, captions, sampling)
    originals = clips[[all_captions.index(caption) for caption in captions]]
    flat = drawn.images.flatten(0, 1)
    nearest = torch.cdist(flat.flatten(1).float(), clips.flatten(1).float()).argmin(dim=1)
    correct = drawn.bear_caption(nearest, all_captions)
    evaluation = Evaluation()
    evaluation.metrics.append(
        EvaluationMetric(
            key="caption_match",
            label="Training captions: the right emoji",
            definition=f"Share of sampled clips whose nearest clip of all {len(clips)}, pixel by pixel, bears the "
            "caption.",
            value=float(correct.double().mean()),
            n=correct.numel(),
            unit="%",
        )
    )
    evaluation.metrics += motion_metrics(flat, originals)
    description = (
        "Captions that were trained on, beside their clip of the training set. A mark tells whether the nearest clip "
        "of the whole set, pixel by pixel, bears the caption."
    )
    evaluation.prompts.append(Prompts("Training captions", description, drawn, correct, originals))
    return evaluation
