from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dalle.data.emoji import openmoji as open_moji
from lightning_dalle.data.emoji.openmoji import OpenMojiDataModule
from lightning_dalle.evaluation.extractors import ModuleExtractor
from lightning_dalle.quickstart import picture_scores
from lightning_dalle.quickstart.picture_scores import evaluate_open_moji, training_prompts
from lightning_dalle.quickstart.settings import Sampling
from tests.unit.quickstart.fakes import fake_models, noise

NUM_IMAGES, SIZE = 40, 16
IMAGES = noise((NUM_IMAGES, 3, SIZE, SIZE), seed=0)
# Rising brightness, so that the reranker's order is known.
IMAGES = (128 + IMAGES.astype(np.int64) // 4 + np.arange(NUM_IMAGES)[:, None, None, None]).astype(np.uint8)
CAPTIONS = [f"emoji {index}" for index in range(NUM_IMAGES)]
SAMPLING = Sampling(num_prompts=6, num_candidates=4)


class Mean(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean(dim=(2, 3))


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenMojiDataModule:
    monkeypatch.setattr(open_moji, "load_open_moji", lambda size, cache: (IMAGES, CAPTIONS))
    extractor = ModuleExtractor(Mean(), "effnet_lite0")
    monkeypatch.setattr(picture_scores, "load_extractor", lambda name: extractor)
    return OpenMojiDataModule(image_size=SIZE, val_share=0.2, cache=tmp_path)


def right_picture(caption: str) -> np.ndarray:
    return IMAGES[CAPTIONS.index(caption)]


def test_prompts_are_training_captions_chosen_by_the_seed(data: OpenMojiDataModule) -> None:
    captions = training_prompts(data, SAMPLING)
    assert len(set(captions)) == 6
    assert set(captions) <= set(data.captions("train"))
    assert captions == training_prompts(data, SAMPLING)
    assert captions != training_prompts(data, Sampling(num_prompts=6, seed=1))


def test_there_are_no_more_prompts_than_captions(data: OpenMojiDataModule) -> None:
    assert len(training_prompts(data, Sampling(num_prompts=1000))) == len(data.captions("train"))


def test_pictures_are_judged_by_the_nearest_of_the_whole_set(data: OpenMojiDataModule) -> None:
    models = fake_models(right_picture, [2, 3], width=3 * SIZE * SIZE)
    evaluation = evaluate_open_moji(models, data, SAMPLING)
    values = {metric.key: metric.value for metric in evaluation.metrics}
    assert values["caption_match_best_of_4"] == 1
    assert values["caption_match_any_of_4"] == 1
    # Noise is no picture's likeness: it bears a caption by chance only.
    assert 0.5 <= values["caption_match_mean_of_4"] < 0.6
    (prompts,) = evaluation.prompts
    assert prompts.originals is not None
    assert torch.equal(prompts.originals, prompts.pictures.best)


def test_distances_have_the_name_of_their_features_and_reconstructions_beside_them(data: OpenMojiDataModule) -> None:
    models = fake_models(right_picture, [2, 3], width=3 * SIZE * SIZE, darkening=50)
    evaluation = evaluate_open_moji(models, data, SAMPLING)
    values = {metric.key: metric.value for metric in evaluation.metrics}
    # The best pictures are the originals, and reconstructions are darker.
    assert values["fd_effnet_lite0_generated"] < 1e-6 < values["fd_effnet_lite0_reconstructed"]
    assert {"kd_effnet_lite0_generated", "kd_effnet_lite0_reconstructed"} <= set(values)
    assert evaluation.details["extractor"]["extractor"] == "effnet_lite0"


def test_reconstructions_of_validation_pictures_have_the_target(data: OpenMojiDataModule) -> None:
    models = fake_models(right_picture, [0], width=3 * SIZE * SIZE, darkening=10)
    metrics = {metric.key: metric for metric in evaluate_open_moji(models, data, SAMPLING).metrics}
    assert metrics["reconstruction_psnr_val"].met is True
    assert metrics["reconstruction_psnr_val"].value == pytest.approx(28.13, abs=0.01)
    assert metrics["reconstruction_psnr_val"].n == len(data.captions("val"))
    assert metrics["reconstruction_psnr_train"].met is None
