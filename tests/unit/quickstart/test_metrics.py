import pytest
import torch

from lightning_dalle.quickstart.evaluation import MAX_PSNR, EvaluationMetric, mean_psnr


def metric(value: float, target: float | None = None, strict: bool = False, unit: str = "%") -> EvaluationMetric:
    return EvaluationMetric(
        key="key", label="Label", definition="How.", value=value, n=8, target=target, strict=strict, unit=unit
    )


@pytest.mark.parametrize(
    ("value", "target", "strict", "met"),
    [(0.9, 0.9, False, True), (0.89, 0.9, False, False), (0.0, 0.0, True, False), (0.01, 0.0, True, True)],
)
def test_a_target_is_met_or_not(value: float, target: float, strict: bool, met: bool) -> None:
    assert metric(value, target, strict).met is met
    assert metric(value, target, strict).as_mapping()["met"] is met


def test_without_a_target_nothing_is_met_or_missed() -> None:
    assert metric(0.5).met is None
    assert metric(0.5).target_text == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9, "%", "90.0 %"),
        (0.125, "points", "+12.5 points"),
        (0.0, "points", "0 points"),
        (22.04, "dB", "22.0 dB"),
        (0.01234, "", "0.0123"),
    ],
)
def test_values_are_shown_in_their_unit(value: float, unit: str, text: str) -> None:
    assert metric(value, unit=unit).value_text == text


def test_targets_say_whether_they_are_enough_themselves() -> None:
    assert metric(1.0, 0.9).target_text == "≥ 90.0 %"
    assert metric(1.0, 0.0, strict=True, unit="points").target_text == "> 0 points"


def test_mean_psnr_is_the_mean_of_the_images_ratios() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    reconstructions = images.clone()
    reconstructions[0] += 255  # 0 dB
    reconstructions[1] += 51  # a fifth of the range: 20 log10(5) dB
    assert mean_psnr(reconstructions, images) == pytest.approx(13.979 / 2, abs=1e-3)


def test_an_exact_image_counts_with_a_finite_ratio() -> None:
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    assert mean_psnr(images, images) == MAX_PSNR
