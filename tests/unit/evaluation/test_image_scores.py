import pytest
import torch
from torch import Tensor
from torchmetrics.image.kid import poly_mmd

from lightning_dalle.evaluation.features import ImageFeatures
from lightning_dalle.evaluation.scores import image_scores


def _features(num_images: int, seed: int, num_classes: int = 0) -> ImageFeatures:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_images, num_classes, generator=generator)
    return ImageFeatures(torch.randn(num_images, 8, generator=generator), logits)


def test_only_inception_scores_bear_the_known_names() -> None:
    real, generated = _features(10, seed=0), _features(10, seed=1, num_classes=5)
    assert set(image_scores(real, generated, "inception")) == {"fid", "kid", "inception_score"}
    named = image_scores(real, generated, "effnet_lite0")
    assert set(named) == {"fd_effnet_lite0", "kd_effnet_lite0", "class_score_effnet_lite0"}


def test_extractors_that_are_no_classifiers_have_no_class_score() -> None:
    assert set(image_scores(_features(10, seed=0), _features(10, seed=1), "mine")) == {"fd_mine", "kd_mine"}


def test_kernel_distance_of_few_images_is_that_of_all() -> None:
    real, generated = _features(10, seed=0), _features(10, seed=1)
    expected = poly_mmd(real.features.double(), generated.features.double(), 3, None, 1.0)
    assert image_scores(real, generated, "mine")["kd_mine"] == pytest.approx(expected.item(), abs=1e-12)


def test_kernel_distance_takes_seeded_subsets_and_leaves_the_random_state_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of full size, but fewer: the mean of a hundred takes seconds.
    monkeypatch.setattr("lightning_dalle.evaluation.scores.NUM_SUBSETS", 5)
    real, generated = _features(1010, seed=0), _features(1005, seed=1)
    state = torch.get_rng_state()
    first = image_scores(real, generated, "mine", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert image_scores(real, generated, "mine", seed=3) == first
    assert image_scores(real, generated, "mine", seed=4) != first


def test_class_score_equals_its_definition() -> None:
    generated = _features(20, seed=1, num_classes=5)
    probabilities = generated.logits.double().softmax(dim=1)
    divergence = (probabilities * (probabilities / probabilities.mean(dim=0)).log()).sum(dim=1).mean()
    score = image_scores(_features(20, seed=0), generated, "mine")["class_score_mine"]
    assert score == pytest.approx(divergence.exp().item(), rel=1e-12)


def test_class_score_of_saturated_logits_is_finite() -> None:
    # In float32 exp(-400) is 0, and 0 * (-inf) was NaN. Three sure and distinct classes give 3.
    logits = 400 * torch.eye(3).repeat(4, 1)
    generated = ImageFeatures(_features(12, seed=1).features, logits)
    assert image_scores(_features(12, seed=0), generated, "mine")["class_score_mine"] == pytest.approx(3.0)


@pytest.mark.parametrize("side", ["real", "generated"])
def test_features_that_are_not_finite_are_refused(side: str) -> None:
    sets = {"real": _features(10, seed=0), "generated": _features(10, seed=1)}
    sets[side].features[3, 2] = torch.nan
    with pytest.raises(FloatingPointError, match=f"{side} features of the extractor mine are not finite"):
        image_scores(sets["real"], sets["generated"], "mine")


def test_scores_that_are_not_finite_are_refused() -> None:
    generated: Tensor = _features(10, seed=1, num_classes=2).logits.clone()
    generated[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="class_score of the extractor mine"):
        image_scores(_features(10, seed=0), ImageFeatures(_features(10, seed=1).features, generated), "mine")
