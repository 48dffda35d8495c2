from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from lightning_dalle.data.moving_shapes.motions import MOTIONS, ShapeMotion, draw_motion, draw_motions
from lightning_dalle.data.moving_shapes.oracle import MotionReading, attribute_shares, matches_each, read_motions
from lightning_dalle.data.shapes.scenes import OBJECT_INDEX, ShapeObject, sprites

ALL_RIGHT = dict.fromkeys(("colour", "shape", "axis", "direction", "speed"), 1.0)
BLUE_CROSS = ShapeMotion("blue", "cross", "right", "slowly")


def clips(motions: list[ShapeMotion], shape: tuple[int, int, int] = (8, 32, 32)) -> Tensor:
    return torch.from_numpy(draw_motions(motions, *shape, np.random.default_rng(0)))


@pytest.fixture(scope="module")
def motions() -> list[ShapeMotion]:
    """48 of the 192, with each word of each kind."""
    return [MOTIONS[index] for index in np.random.default_rng(0).permutation(len(MOTIONS))[:48]]


@pytest.fixture(scope="module")
def captions(motions: list[ShapeMotion]) -> list[str]:
    return [motion.caption for motion in motions]


@pytest.fixture(scope="module")
def clean(motions: list[ShapeMotion]) -> Tensor:
    return clips(motions)


@pytest.fixture
def blue_cross() -> Tensor:
    """[3, 8, 32, 32]"""
    return torch.from_numpy(draw_motion(BLUE_CROSS, (10, 4), 8, 32, 32))


def noise(video: Tensor) -> Tensor:
    noisy = video + 16 * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return noisy.round().clamp(0, 255).to(torch.uint8)


def blur(video: Tensor) -> Tensor:
    frames = gaussian_blur(video.transpose(1, 2).flatten(0, 1), [5, 5], [0.8, 0.8])
    return frames.unflatten(0, (len(video), -1)).transpose(1, 2)


def fade(video: Tensor) -> Tensor:
    return (video * 0.8 + 0.2 * 235).to(torch.uint8)


def lose_a_frame(video: Tensor) -> Tensor:
    return video.index_fill(2, torch.tensor([3]), 255)


def test_clean_clips_are_read_without_a_mistake(clean: Tensor, captions: list[str]) -> None:
    assert matches_each(clean, captions).all()
    assert attribute_shares(clean, captions) == ALL_RIGHT


@pytest.mark.parametrize("damage", [noise, blur, fade, lose_a_frame])
def test_slightly_damaged_clips_are_read(
    clean: Tensor, captions: list[str], damage: Callable[[Tensor], Tensor]
) -> None:
    assert matches_each(damage(clean), captions).float().mean() >= 0.99


@pytest.mark.parametrize("shape", [(12, 32, 32), (2, 32, 48), (8, 45, 24)])
def test_any_number_of_frames_and_size_is_read(motions: list[ShapeMotion], shape: tuple[int, int, int]) -> None:
    chosen = motions[::4]
    assert matches_each(clips(chosen, shape), [motion.caption for motion in chosen]).all()


@pytest.mark.parametrize(
    "wrong", [{"colour": "red"}, {"shape": "square"}, {"direction": "left"}, {"direction": "up"}, {"speed": "fast"}]
)
def test_a_caption_with_one_wrong_word_is_refused(blue_cross: Tensor, wrong: dict[str, str]) -> None:
    (word,) = wrong
    assert matches_each(blue_cross[None], [BLUE_CROSS.caption]).all()
    caption = replace(BLUE_CROSS, **wrong).caption
    assert not matches_each(blue_cross[None], [caption]).any()
    same_axis = wrong == {"direction": "left"}
    expected = {**ALL_RIGHT, word: 0.0, **({"axis": float(same_axis)} if word == "direction" else {})}
    assert attribute_shares(blue_cross[None], [caption]) == expected


def test_a_clip_shown_backwards_moves_the_other_way(clean: Tensor, captions: list[str]) -> None:
    shares = attribute_shares(clean.flip(2), captions)
    assert shares == {**ALL_RIGHT, "direction": 0.0}


def test_what_stands_still_has_no_motion(blue_cross: Tensor) -> None:
    still = blue_cross[:, :1].expand(-1, 8, -1, -1)[None]
    assert read_motions(still) == [MotionReading("blue", "cross", None, None)]


def test_what_moves_diagonally_or_jumps_has_no_direction(blue_cross: Tensor) -> None:
    diagonal = torch.stack([frame.roll(step, dims=1) for step, frame in enumerate(blue_cross.unbind(1))], dim=1)
    jumping = torch.stack(
        [frame.roll(5 * (step % 2), dims=2) for step, frame in enumerate(blue_cross.unbind(1))], dim=1
    )
    assert read_motions(torch.stack([diagonal, jumping])) == [MotionReading("blue", "cross", None, None)] * 2


def test_what_is_faster_than_fast_has_a_direction_and_no_speed(blue_cross: Tensor) -> None:
    assert read_motions(blue_cross[None, :, ::3]) == [MotionReading("blue", "cross", "right", None)]


def test_what_changes_on_the_way_has_no_word_for_it(blue_cross: Tensor) -> None:
    red = torch.from_numpy(draw_motion(replace(BLUE_CROSS, colour="red"), (10, 4), 8, 32, 32))
    mixed = torch.cat([blue_cross[:, :4], red[:, 4:]], dim=1)
    assert read_motions(mixed[None]) == [MotionReading(None, "cross", "right", "slowly")]


@pytest.mark.parametrize("size", ["small", "medium"])
def test_nothing_is_read_where_a_second_object_is(blue_cross: Tensor, size: str) -> None:
    second = torch.from_numpy(sprites(32)[OBJECT_INDEX[ShapeObject(size, "yellow", "square")]])
    side = second.shape[-1]
    blue_cross[:, :, 21 : 21 + side, 21 : 21 + side] = second[:, None]
    assert read_motions(blue_cross[None]) == [MotionReading()]


def test_nothing_is_read_from_even_pictures_and_noise() -> None:
    even = torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(3, 1, 1, 1, 1).expand(3, 3, 8, 32, 32)
    noisy = torch.randint(0, 256, (3, 3, 8, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert read_motions(torch.cat([even, noisy])) == [MotionReading()] * 6


def test_nothing_is_read_from_an_object_that_is_there_half_of_the_time(blue_cross: Tensor) -> None:
    blue_cross[:, :4] = 255
    assert read_motions(blue_cross[None]) == [MotionReading()]


def test_no_clips_have_no_mean_and_match_nothing() -> None:
    with pytest.raises(ValueError, match="captions must not be empty"):
        attribute_shares(torch.zeros(0, 3, 8, 32, 32, dtype=torch.uint8), [])
    assert matches_each(torch.zeros(0, 3, 8, 32, 32, dtype=torch.uint8), []).shape == (0,)
