from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from lightning_dalle.data.shapes.oracle import attribute_shares, matches, matches_each, read_scenes
from lightning_dalle.data.shapes.scenes import OBJECTS, Scene, draw, held_out_scenes, render, trained_scenes
from lightning_dalle.ops.k_means import k_means, nearest_centre


def pictures(scenes: list[Scene], image_size: int = 40) -> Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(np.stack([render(scene, image_size, generator) for scene in scenes]))


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    two = trained_scenes(2) + held_out_scenes(2)
    chosen = np.random.default_rng(0).permutation(len(two))[:150]
    return [Scene((item,)) for item in OBJECTS] * 3 + [two[index] for index in chosen]


@pytest.fixture(scope="module")
def captions(scenes: list[Scene]) -> list[str]:
    return [scene.caption for scene in scenes]


@pytest.fixture(scope="module")
def clean(scenes: list[Scene]) -> Tensor:
    return pictures(scenes)


def noise(images: Tensor) -> Tensor:
    noisy = images + 8 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return noisy.round().clamp(0, 255).to(torch.uint8)


def blur(images: Tensor) -> Tensor:
    # From a deviation of 1 pixel on, the corners of a cross of 12 pixels fill up to a diamond.
    return gaussian_blur(images, [5, 5], [0.8, 0.8])


def test_clean_pictures_are_read_without_a_mistake(clean: Tensor, captions: list[str]) -> None:
    assert matches_each(clean, captions).all()
    assert attribute_shares(clean, captions) == {"size": 1, "colour": 1, "shape": 1, "relation": 1}


@pytest.mark.parametrize("image_size", [24, 45, 64])
def test_any_size_is_read(scenes: list[Scene], image_size: int) -> None:
    chosen = scenes[::12]
    assert matches_each(pictures(chosen, image_size), [scene.caption for scene in chosen]).all()


@pytest.mark.parametrize("damage", [noise, blur])
def test_slightly_damaged_pictures_are_read(
    clean: Tensor, captions: list[str], damage: Callable[[Tensor], Tensor]
) -> None:
    assert matches_each(damage(clean), captions).float().mean() >= 0.98


def test_pictures_quantised_by_patches_are_read(clean: Tensor, captions: list[str]) -> None:
    """256 codes for 4 x 4 patches: what a good discrete autoencoder keeps."""
    patches = clean.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2) / 255
    codes = k_means(patches, 256, iterations=4, seed=0)
    coded = (
        codes[nearest_centre(patches, codes)]
        .reshape(-1, 10, 10, 3, 4, 4)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(clean.shape)
    )
    quantised = (coded * 255).round().clamp(0, 255).to(torch.uint8)
    assert matches_each(quantised, captions).float().mean() >= 0.98


def test_a_picture_matches_both_ways_to_say_it_and_no_other() -> None:
    image = pictures([Scene((OBJECTS[2], OBJECTS[52]), "left of")])[0]
    first, second = OBJECTS[2].phrase, OBJECTS[52].phrase
    assert matches(image, f"{first} left of {second}")
    assert matches(image, f"{second} right of {first}")
    for wrong in (f"{first} right of {second}", f"{first} above {second}", first, f"{first} left of {first}"):
        assert not matches(image, wrong)


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_nothing_is_read_from_an_even_picture(grey: int) -> None:
    assert read_scenes(torch.full((3, 32, 32), grey, dtype=torch.uint8)[None]) == [None]


def test_nothing_is_read_from_noise() -> None:
    noisy = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert read_scenes(noisy) == [None] * 8


def test_nothing_is_read_from_three_objects() -> None:
    image = torch.from_numpy(draw([0, 5, 10], [(0, 0), (20, 20), (0, 20)], 32))
    assert read_scenes(image[None]) == [None]


def test_a_faint_object_is_none() -> None:
    image = torch.from_numpy(draw([2], [(8, 8)], 32))
    assert read_scenes((255 - (255 - image.float()) * 0.8).to(torch.uint8)[None]) == [Scene((OBJECTS[2],))]
    assert read_scenes((255 - (255 - image.float()) * 0.4).to(torch.uint8)[None]) == [None]


def test_partial_shares_pair_the_objects_as_suits_best() -> None:
    image = pictures([Scene((OBJECTS[2], OBJECTS[52]), "left of")])
    # A small red diamond left of a large green square, asked for the other way round and with one wrong colour.
    assert (OBJECTS[2].phrase, OBJECTS[52].phrase) == ("a small red diamond", "a large green square")
    caption = "a large blue square left of a small red diamond"
    assert attribute_shares(image, [caption]) == {"size": 1, "colour": 0.5, "shape": 1, "relation": 0}


def test_an_unreadable_picture_has_no_share() -> None:
    blank = torch.full((1, 3, 40, 40), 255, dtype=torch.uint8)
    assert attribute_shares(blank, ["a small red diamond"]) == {"size": 0, "colour": 0, "shape": 0, "relation": 0}


def test_no_pictures_have_no_mean() -> None:
    with pytest.raises(ValueError, match="captions must not be empty"):
        attribute_shares(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), [])


def test_no_pictures_match_nothing() -> None:
    assert matches_each(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), []).shape == (0,)
