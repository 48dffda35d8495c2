from dataclasses import astuple
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lightning_dalle.data.moving_shapes.motions import (
    DIRECTIONS,
    MOTIONS,
    NUM_HELD_OUT_MOTIONS,
    SPEEDS,
    ShapeMotion,
    check_clip_shape,
    draw_motion,
    draw_motions,
    held_out_motions,
    most_frames,
    parse_motion,
    pixels_per_frame,
    place_motion,
    trained_motions,
)

ORANGE_CROSS = ShapeMotion("orange", "cross", "up", "fast")


def test_captions_read_like_sentences() -> None:
    assert ORANGE_CROSS.caption == "an orange cross moving up fast"
    assert MOTIONS[0].caption == "a red square moving left slowly"


def test_every_caption_is_parsed_to_its_motion() -> None:
    assert [parse_motion(motion.caption) for motion in MOTIONS] == list(MOTIONS)
    assert parse_motion("  AN  Orange cross\nmoving up FAST ") == ORANGE_CROSS


@pytest.mark.parametrize("caption", ["", "a red square", "a red square moving left", "a red square moving fast left"])
def test_a_caption_of_something_else_is_refused(caption: str) -> None:
    with pytest.raises(ValueError, match="does not describe a moving shape; write it like 'a red square moving left"):
        parse_motion(caption)


def test_any_three_words_are_trained_on_with_all_of_the_fourth_kind_but_one() -> None:
    assert len(held_out_motions()) == NUM_HELD_OUT_MOTIONS
    assert set(held_out_motions()) | set(trained_motions()) == set(MOTIONS)
    assert len(trained_motions()) == len(MOTIONS) - NUM_HELD_OUT_MOTIONS
    for first, second in combinations(held_out_motions(), 2):
        assert sum(one == other for one, other in zip(astuple(first), astuple(second), strict=True)) < 3


def test_the_split_is_the_published_one() -> None:
    """Metrics of different versions are compared: the split must not move."""
    captions = [motion.caption for motion in held_out_motions()]
    assert captions[:3] == [
        "a red square moving left slowly",
        "a red square moving up fast",
        "a red triangle moving right fast",
    ]
    assert captions[-1] == "an orange cross moving left slowly"


def test_a_small_clip_is_drawn_as_by_hand() -> None:
    clip = draw_motion(ShapeMotion("red", "square", "right", "fast"), (4, 3), 3, 32, 40)
    expected = np.full((3, 3, 32, 40), 255, dtype=np.uint8)
    for frame, column in enumerate((3, 5, 7)):
        expected[:, frame, 4:14, column : column + 10] = np.array([215, 25, 30])[:, None, None]
    np.testing.assert_array_equal(clip, expected)


@settings(max_examples=50, deadline=None)
@given(
    strategies.sampled_from(MOTIONS),
    strategies.integers(24, 72),
    strategies.integers(24, 72),
    strategies.sampled_from([0.0, 0.5, 1.0]),
    strategies.integers(0, 2**30),
)
def test_a_shape_stays_whole_and_keeps_its_pace(
    motion: ShapeMotion, height: int, width: int, share: float, seed: int
) -> None:
    frames = 2 + round(share * (most_frames(height, width) - 2))
    clip = draw_motions([motion], frames, height, width, np.random.default_rng(seed))[0]
    dark = (clip < 255).any(axis=0)
    assert len(set(dark.sum(axis=(1, 2)).tolist())) == 1
    middles = np.array([np.argwhere(frame).mean(axis=0) for frame in dark])
    step = pixels_per_frame(motion.speed, min(height, width))
    for moved in np.diff(middles, axis=0):
        np.testing.assert_allclose(moved, np.multiply(DIRECTIONS[motion.direction], step))


def test_places_differ_and_follow_the_generator() -> None:
    motion = MOTIONS[0]
    places = {place_motion(motion, 8, 32, 32, np.random.default_rng(seed)) for seed in range(30)}
    assert len(places) > 15
    assert place_motion(motion, 8, 32, 32, np.random.default_rng(3)) in places


def test_a_pace_does_not_depend_on_the_length_of_the_clip() -> None:
    assert [pixels_per_frame(speed, 32) for speed in SPEEDS] == [1, 2]
    assert [pixels_per_frame(speed, 64) for speed in SPEEDS] == [2, 4]
    assert (most_frames(32, 32), most_frames(32, 48), most_frames(48, 32)) == (12, 12, 12)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 32, 32), r"frames \(1\) must be between 2, to show motion, and 12"),
        ((13, 32, 32), r"frames \(13\) must be .* 12, after which a fast shape leaves a picture of 32 x 32"),
        ((8, 20, 32), r"height \(20\) must be at least 24"),
        ((8, 32, 20), r"width \(20\) must be at least 24"),
    ],
)
def test_clips_that_cannot_show_motion_are_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_clip_shape(*shape)
