import numpy as np
import pytest
import torch

from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.shapes.scenes import parse_caption, render
from lightning_dalle.quickstart.picture_scores import evaluate_shapes, held_out_prompts
from lightning_dalle.quickstart.settings import Sampling
from tests.unit.quickstart.fakes import fake_models

SAMPLING = Sampling(num_prompts=10, num_candidates=3, temperature=0.9, top_p=0.8, guidance_scale=2.0, seed=5)


def right_picture(caption: str) -> np.ndarray:
    return render(parse_caption(caption), 32, np.random.default_rng(0))


@pytest.fixture(scope="module")
def data() -> CaptionedShapesDataModule:
    return CaptionedShapesDataModule(num_train=20, num_val=20)


def test_prompts_of_one_object_are_all_of_them_repeated(data: CaptionedShapesDataModule) -> None:
    captions = held_out_prompts(data, 1, Sampling(num_prompts=50))
    assert len(captions) == 48
    assert set(captions) == set(data.held_out_captions(1))


def test_prompts_of_two_objects_are_different_ones_chosen_by_the_seed(data: CaptionedShapesDataModule) -> None:
    captions = held_out_prompts(data, 2, Sampling(num_prompts=50))
    assert len(set(captions)) == 50
    assert set(captions) <= set(data.held_out_captions(2))
    assert captions == held_out_prompts(data, 2, Sampling(num_prompts=50))
    assert captions != held_out_prompts(data, 2, Sampling(num_prompts=50, seed=1))


def test_right_pictures_that_the_reranker_prefers_are_all_right(data: CaptionedShapesDataModule) -> None:
    # Drawn shapes are mostly white, so the reranker that likes brightness puts them before noise.
    models = fake_models(right_picture, [1], width=3 * 32 * 32)
    evaluation = evaluate_shapes(models, data, SAMPLING)
    values = {metric.key: metric.value for metric in evaluation.metrics}
    for key in ("one_object", "two_object"):
        assert values[f"{key}_best_of_3"] == 1
        assert values[f"{key}_mean_of_3"] == pytest.approx(1 / 3)
        assert values[f"{key}_gain_of_reranking"] == pytest.approx(2 / 3)
        assert set(evaluation.details[f"{key}_attributes"]["best"].values()) == {1.0}
    assert [prompts.correct[:, 0].all().item() for prompts in evaluation.prompts] == [True, True]
    assert all((prompts.pictures.scores.diff(dim=1) <= 0).all() for prompts in evaluation.prompts)


def test_the_settings_of_sampling_reach_the_model(data: CaptionedShapesDataModule) -> None:
    models = fake_models(right_picture, [0], width=3 * 32 * 32)
    evaluate_shapes(models, data, SAMPLING)
    call = models.text_to_image.calls[0]
    assert (call["temperature"], call["top_p"], call["guidance_scale"]) == (0.9, 0.8, 2.0)
    assert isinstance(call["generator"], torch.Generator)


@pytest.mark.parametrize(("darkening", "accuracy"), [(0, 1.0), (200, 0.0)])
def test_the_oracle_judges_reconstructions(data: CaptionedShapesDataModule, darkening: int, accuracy: float) -> None:
    models = fake_models(right_picture, [0], width=3 * 32 * 32, darkening=darkening)
    metrics = {metric.key: metric for metric in evaluate_shapes(models, data, SAMPLING).metrics}
    assert metrics["reconstruction_oracle_accuracy"].value == accuracy
    assert metrics["reconstruction_oracle_accuracy"].n == 20
    assert {"reconstruction_psnr_val", "reconstruction_psnr_train"} <= set(metrics)
