from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightning_dalle.data import augmentation
from lightning_dalle.data.augmentation import (
    area_resize,
    augmentation_named,
    discrete_vae_augmentation,
    middle_square,
    text_to_image_augmentation,
)


def gradient(height: int, width: int) -> np.ndarray:
    """Rows in the first channel, columns in the second."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, rows * 0]).astype(np.uint8)


def naive_area_resize(image: np.ndarray, size: int, fine: int) -> np.ndarray:
    """Repeat every pixel until the target divides, then take means."""
    repeated = image.repeat(fine, axis=1).repeat(fine, axis=2).astype(np.float64)
    height, width = repeated.shape[1] // size, repeated.shape[2] // size
    return repeated.reshape(3, size, height, size, width).mean(axis=(2, 4))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_area_resize_takes_the_mean_of_the_covered_area(height: int, width: int, size: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (3, height, width)).astype(np.uint8)
    expected = naive_area_resize(image, size, fine=size)
    # Half a level from rounding, and single precision.
    np.testing.assert_allclose(area_resize(image, size), expected, atol=0.501)


def test_area_resize_keeps_an_image_of_the_right_size() -> None:
    image = gradient(8, 8)
    np.testing.assert_array_equal(area_resize(image, 8), image)
    np.testing.assert_array_equal(area_resize(image, 16), image.repeat(2, axis=1).repeat(2, axis=2))


@pytest.mark.parametrize(
    "augment",
    [discrete_vae_augmentation, text_to_image_augmentation, lambda image, size, _: middle_square(image, size)],
)
@pytest.mark.parametrize("size", [(1, 1), (5, 300), (64, 64), (70, 65), (300, 200), (33, 31)])
def test_any_image_gives_the_target_and_the_input_is_kept(augment: Callable, size: tuple[int, int]) -> None:
    image = gradient(*size)
    for seed in range(5):
        out = augment(image, 32, np.random.default_rng(seed))
        assert (out.shape, out.dtype, out.flags.c_contiguous) == ((3, 32, 32), np.uint8, True)
    np.testing.assert_array_equal(image, gradient(*size))


@pytest.mark.parametrize("augment", [discrete_vae_augmentation, text_to_image_augmentation])
def test_augmentation_depends_on_the_generator_alone(augment: Callable) -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 90, 60)).astype(np.uint8)
    outs = [augment(image, 32, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()


class Recorded:
    """Records the arguments of `area_resize`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[np.ndarray] = []
        self.sizes: list[int] = []
        monkeypatch.setattr(augmentation, "area_resize", self)

    def __call__(self, image: np.ndarray, size: int) -> np.ndarray:
        self.images.append(image)
        self.sizes.append(size)
        return area_resize(image, size)


@pytest.mark.parametrize(
    ("augment", "side", "sizes"),
    [
        # Listing 1: [min(s, 9/8 t), min(s, 12/8 t)]; listing 2: [t, min(s, 9/8 t)]; t where there are fewer pixels.
        (discrete_vae_augmentation, 100, range(36, 49)),
        (discrete_vae_augmentation, 40, range(36, 41)),
        (discrete_vae_augmentation, 34, [34]),
        (discrete_vae_augmentation, 20, [32]),
        (text_to_image_augmentation, 100, range(32, 37)),
        (text_to_image_augmentation, 34, range(32, 35)),
        (text_to_image_augmentation, 20, [32]),
    ],
)
def test_resized_sides_are_those_of_the_listings(
    monkeypatch: pytest.MonkeyPatch, augment: Callable, side: int, sizes: range | list[int]
) -> None:
    recorded = Recorded(monkeypatch)
    for seed in range(300):
        augment(gradient(side, side + 20), 32, np.random.default_rng(seed))
    assert set(recorded.sizes) == set(sizes)
    assert {image.shape for image in recorded.images} == {(3, side, side)}


def test_first_crops_are_anywhere_in_listing_1_and_in_the_middle_quarter_in_listing_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = []
    for augment in (discrete_vae_augmentation, text_to_image_augmentation):
        recorded = Recorded(monkeypatch)
        for seed in range(400):
            augment(gradient(40, 80), 32, np.random.default_rng(seed))
        starts.append({int(image[1, 0, 0]) for image in recorded.images})
    assert starts == [set(range(41)), set(range(15, 25))]


def test_only_listing_1_mirrors_and_only_if_asked_to() -> None:
    image = gradient(60, 60)

    def share_mirrored(augment: Callable) -> float:
        outs = [augment(image, 32, np.random.default_rng(seed)) for seed in range(200)]
        return float(np.mean([out[1, 0, 0] > out[1, 0, -1] for out in outs]))

    assert share_mirrored(discrete_vae_augmentation) == pytest.approx(0.5, abs=0.1)
    assert share_mirrored(partial(discrete_vae_augmentation, flip=False)) == 0
    assert share_mirrored(text_to_image_augmentation) == 0


def test_the_middle_square_is_not_random() -> None:
    np.testing.assert_array_equal(middle_square(gradient(8, 12), 8), gradient(8, 12)[:, :, 2:10])


def test_an_unknown_augmentation_is_named() -> None:
    assert augmentation_named("none") is None
    assert augmentation_named("discrete_vae") is discrete_vae_augmentation
    with pytest.raises(ValueError, match=r"augmentation \('mixup'\) must be one of none, discrete_vae, text_to_image"):
        augmentation_named("mixup")
