from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_dalle.evaluation.features import FeatureCache


class _CountingExtractor:
    def __init__(self) -> None:
        self.num_images = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.num_images += len(images)
        return images.flatten(1).float()[:, :4]


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_known_images_are_not_extracted_again(images: Tensor, tmp_path: Path) -> None:
    extract = _CountingExtractor()
    cache = FeatureCache(tmp_path / "folder" / "features.pt")
    features = cache.features(images, extract)
    assert torch.equal(features, images.flatten(1).float()[:, :4])
    cache.save()
    again = FeatureCache(cache.path)
    assert torch.equal(again.features(images.flip(0), extract), features.flip(0))
    assert extract.num_images == 5


def test_changed_images_are_extracted(images: Tensor, tmp_path: Path) -> None:
    extract = _CountingExtractor()
    cache = FeatureCache(tmp_path / "features.pt")
    cache.features(images, extract)
    changed = images.clone()
    changed[2, 0, 0, 0] ^= 1
    assert torch.equal(cache.features(changed, extract), changed.flatten(1).float()[:, :4])
    assert extract.num_images == 6


def test_images_of_equal_bytes_and_other_shape_are_not_confused(tmp_path: Path) -> None:
    extract = _CountingExtractor()
    cache = FeatureCache(tmp_path / "features.pt")
    cache.features(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), extract)
    cache.features(torch.zeros(1, 3, 2, 8, dtype=torch.uint8), extract)
    assert extract.num_images == 2


def test_file_keeps_what_was_asked_for_last_and_no_rest(images: Tensor, tmp_path: Path) -> None:
    extract = _CountingExtractor()
    cache = FeatureCache(tmp_path / "features.pt")
    cache.features(images, extract)
    cache.save()
    second = FeatureCache(cache.path)
    second.features(images[:2], extract)
    second.save()
    assert len(torch.load(cache.path, weights_only=True)["features"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["features.pt"]


def test_nothing_asked_for_writes_nothing(tmp_path: Path) -> None:
    FeatureCache(tmp_path / "features.pt").save()
    assert not list(tmp_path.iterdir())
