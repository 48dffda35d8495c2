"""How drawn pictures are evaluated: shapes by an oracle that reads them back, emoji by the image they resemble most."""

import random

from torch import Tensor

from lightning_dalle.data.emoji.openmoji import OpenMojiDataModule
from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.shapes.oracle import attribute_shares, matches_each
from lightning_dalle.evaluation.extractors import load_extractor
from lightning_dalle.evaluation.scores import image_scores, nearest_neighbours
from lightning_dalle.quickstart.evaluation import (
    Evaluation,
    EvaluationMetric,
    Prompts,
    best_of_metrics,
    reconstruction_metrics,
)
from lightning_dalle.quickstart.pictures import (
    Models,
    RankedPictures,
    draw_ranked,
    reconstruct,
    split_samples,
    training_prompts,
)
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
        _evaluate_prompts(evaluation, models, held_out_prompts(data, num_objects, sampling), num_objects, sampling)
    _evaluate_reconstructions(evaluation, models, data)
    return evaluation


def held_out_prompts(data: CaptionedShapesDataModule, num_objects: int, sampling: Sampling) -> list[str]:
    """Return captions never trained on: some of two objects, or all of one object as often as makes about as many."""
    captions = data.held_out_captions(num_objects)
    if len(captions) > sampling.num_prompts:
        return random.Random(sampling.seed).sample(captions, sampling.num_prompts)
    return captions * max(1, round(sampling.num_prompts / len(captions)))


def _evaluate_prompts(
    evaluation: Evaluation, models: Models, captions: list[str], num_objects: int, sampling: Sampling
) -> None:
    pictures = draw_ranked(models, captions, sampling)
    correct = matches_each(pictures.images.flatten(0, 1), pictures.repeated_captions)
    correct = correct.unflatten(0, pictures.images.shape[:2])
    words = _WORDS[num_objects]
    key = words.replace(" ", "_").removesuffix("s")
    evaluation.metrics += best_of_metrics(
        correct,
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
    evaluation.prompts.append(Prompts(f"Held-out captions of {words}", description, pictures, correct))


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


CAPTION_TARGET = 0.6
PSNR_TARGET = 22.0
EXTRACTOR = "effnet_lite0"


def evaluate_open_moji(models: Models, data: OpenMojiDataModule, sampling: Sampling) -> Evaluation:
    """Measure training captions, and what the discrete VAE keeps of all pictures."""
    evaluation = Evaluation()
    images, all_captions = split_samples(data, "all")
    captions = training_prompts(data, sampling)
    pictures = draw_ranked(models, captions, sampling)
    originals = images[[all_captions.index(caption) for caption in captions]]
    correct = _bears_caption(models, pictures, images, all_captions)
    evaluation.metrics += best_of_metrics(
        correct,
        key="caption_match",
        label="Training captions",
        what="has, of the whole set, the picture of its caption as the nearest by the reranker's image features",
        target=CAPTION_TARGET,
        num_candidates=sampling.candidates,
    )
    description = (
        "Captions that were trained on, beside their picture of the training set. A mark tells whether the nearest "
        "picture of the whole set, by the reranker's image features, bears the caption."
    )
    evaluation.prompts.append(Prompts("Training captions", description, pictures, correct, originals))
    splits = {split: split_samples(data, split)[0] for split in ("val", "train")}
    reconstructions = {split: reconstruct(models.discrete_vae, part) for split, part in splits.items()}
    evaluation.metrics += reconstruction_metrics(splits, reconstructions, PSNR_TARGET)
    _evaluate_likeness(evaluation, models, pictures.best, originals)
    return evaluation


def _bears_caption(models: Models, pictures: RankedPictures, images: Tensor, all_captions: list[str]) -> Tensor:
    """Return whether the nearest image of the set bears the caption of each candidate."""
    candidates = models.contrastive.encode_images(pictures.images.flatten(0, 1))
    nearest, _ = nearest_neighbours(candidates, models.contrastive.encode_images(images))
    return pictures.bear_caption(nearest, all_captions)


def _evaluate_likeness(evaluation: Evaluation, models: Models, best: Tensor, originals: Tensor) -> None:
    """Distances of generated from real pictures, beside those of mere reconstructions, which bound them from below."""
    extractor = load_extractor(EXTRACTOR)
    real = extractor.extract(originals)
    names = {"kd": "Kernel distance", "fd": "Fréchet distance"}
    for source, images in (("generated", best), ("reconstructed", reconstruct(models.discrete_vae, originals))):
        scores = image_scores(real, extractor.extract(images), EXTRACTOR)
        evaluation.metrics += [
            EvaluationMetric(
                key=f"{kind}_{EXTRACTOR}_{source}",
                label=f"{name}, {source} pictures",
                definition=f"Between the {source} and the real pictures of {len(images)} captions, by features of "
                f"EfficientNet-Lite0 (not FID or KID); lower is better"
                + ("." if kind == "kd" else ", and few pictures raise it: compare equal n only."),
                value=scores[f"{kind}_{EXTRACTOR}"],
                n=len(images),
            )
            for kind, name in names.items()
        ]
    evaluation.details["extractor"] = extractor.details
