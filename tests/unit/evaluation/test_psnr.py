import math

import pytest
import torch

from lightning_dalle.evaluation.psnr import psnr


def test_equals_its_definition_without_wrapping_bytes() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    reconstructions = images.clone()
    reconstructions[0] = 200
    assert psnr(reconstructions, images) == pytest.approx(10 * math.log10(255**2 / (200**2 / 2)))


def test_of_equal_images_is_infinite() -> None:
    images = torch.full((1, 3, 2, 2), 7, dtype=torch.uint8)
    assert psnr(images, images) == math.inf
