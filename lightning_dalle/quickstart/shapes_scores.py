"""How pictures of drawn shapes are evaluated: the oracle reads back what they show."""

import random

from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.shapes.oracle import attribute_shares, matches_each
from lightning_dalle.quickstart.evaluation import (
    Evaluation,
    EvaluationMetric,
    Prompts,
    best_of_metrics,
    reconstruction_metrics,
)
from lightning_dalle.quickstart.pictures import Models, draw_ranked, reconstruct, split_samples
from lightning_dalle.quickstart.settings import Sampling

NUM_TRAINING_PICTURES = 1000
TARGETS = {1: 0.9, 2: 0.6}
RECONSTRUCTION_TARGET = 0.98
_WORDS = {1: "one object", 2: "two objects"}
_HELD_OUT = {
    1: "The three words of each caption never met in training.",
    2: "Both objects were trained on, but never in one picture, in whatever relation.",
}


def evaluate_shapes(models: Models, data: CaptionedShapesDataModule, sampling: Sampling) -> Evaluation:
    """Measure held-out captions, and what the discrete VAE keeps of validation pictures."""
    evaluation = Evaluation()
    for num_objects in data.counts:
        _judge_prompts(evaluation, models, held_out_prompts(data, num_objects, sampling), num_objects, sampling)
    _evaluate_reconstructions(evaluation, models, data)
    return evaluation


def held_out_prompts(data: CaptionedShapesDataModule, num_objects: int, sampling: Sampling) -> list[str]:
    """Captions never trained on: some of two objects, or all of one object as often as makes about as many."""
    captions = data.held_out_captions(num_objects)
    if len(captions) > sampling.num_prompts:
        return random.Random(sampling.seed).sample(captions, sampling.num_prompts)
    return captions * max(1, round(sampling.num_prompts / len(captions)))


def _judge_prompts(
    evaluation: Evaluation, models: Models, captions: list[str], num_objects: int, sampling: Sampling
) -> None:
    pictures = draw_ranked(models, captions, sampling)
    marks = matches_each(pictures.images.flatten(0, 1), pictures.repeated_captions)
    marks = marks.unflatten(0, pictures.images.shape[:2])
    words = _WORDS[num_objects]
    key = words.replace(" ", "_").removesuffix("s")
    evaluation.metrics += best_of_metrics(
        marks,
        key=key,
        label=f"Held-out, {words}",
        what="is read back by the oracle wholly as the caption says",
        target=TARGETS[num_objects],
        num_candidates=sampling.candidates,
    )
    evaluation.details[f"{key}_attributes"] = {
        "best": attribute_shares(pictures.best, captions),
        "mean": attribute_shares(pictures.images.flatten(0, 1), pictures.repeated_captions),
    }
    description = f"{_HELD_OUT[num_objects]} A mark tells whether the oracle reads the caption back from the picture."
    evaluation.prompts.append(Prompts(f"Held-out captions of {words}", description, pictures, marks))


def _evaluate_reconstructions(evaluation: Evaluation, models: Models, data: CaptionedShapesDataModule) -> None:
    images, captions = split_samples(data, "val")
    reconstructions = {"val": reconstruct(models.discrete_vae, images)}
    evaluation.metrics.append(
        EvaluationMetric(
            key="reconstruction_oracle_accuracy",
            label="Reconstructions, oracle",
            definition="Share of validation pictures that the oracle still reads back wholly after the code and back.",
            value=float(matches_each(reconstructions["val"], captions).double().mean()),
            n=len(images),
            target=RECONSTRUCTION_TARGET,
            unit="%",
        )
    )
    originals = {"val": images, "train": split_samples(data, "train", NUM_TRAINING_PICTURES)[0]}
    reconstructions["train"] = reconstruct(models.discrete_vae, originals["train"])
    evaluation.metrics += reconstruction_metrics(originals, reconstructions, target=None)
