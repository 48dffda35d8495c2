"""How pictures of emoji are evaluated: by the image of the set that they resemble most."""

from torch import Tensor

from lightning_dalle.data.emoji.openmoji import OpenMojiDataModule
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
    marks = _bears_caption(models, pictures, images, all_captions)
    evaluation.metrics += best_of_metrics(
        marks,
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
    evaluation.prompts.append(Prompts("Training captions", description, pictures, marks, originals))
    splits = {split: split_samples(data, split)[0] for split in ("val", "train")}
    reconstructions = {split: reconstruct(models.discrete_vae, part) for split, part in splits.items()}
    evaluation.metrics += reconstruction_metrics(splits, reconstructions, PSNR_TARGET)
    _evaluate_likeness(evaluation, models, pictures.best, originals)
    return evaluation


def _bears_caption(models: Models, pictures: RankedPictures, images: Tensor, all_captions: list[str]) -> Tensor:
    """Whether the nearest image of the set bears the caption of each candidate."""
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
