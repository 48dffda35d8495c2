import numpy as np
import pytest

from lightning_dalle.data.shapes.scenes import (
    OBJECTS,
    RELATIONS,
    SIZES,
    Scene,
    ShapeObject,
    draw,
    held_out_scenes,
    parse_caption,
    place,
    render,
    shape_mask,
    sprite_side,
    trained_scenes,
)

BLUE_SQUARE, RED_DIAMOND = ShapeObject("large", "blue", "square"), ShapeObject("small", "red", "diamond")


def test_captions_read_like_sentences() -> None:
    assert Scene((RED_DIAMOND,)).caption == "a small red diamond"
    assert Scene((BLUE_SQUARE, RED_DIAMOND), "above").caption == "a large blue square above a small red diamond"


@pytest.mark.parametrize("relation", [None, *RELATIONS])
def test_a_caption_is_parsed_to_the_scene_it_was_made_from(relation: str | None) -> None:
    scene = Scene((BLUE_SQUARE, RED_DIAMOND) if relation else (BLUE_SQUARE,), relation)
    assert parse_caption(scene.caption) == scene
    assert parse_caption(f"  {scene.caption.upper()}\n") == scene


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a red diamond",
        "a small red diamond above",
        "a small red diamond near a large red diamond",
        "a small red diamond!",
    ],
)
def test_a_caption_of_something_else_is_refused(caption: str) -> None:
    with pytest.raises(ValueError, match="does not describe shapes; write it like 'a small red square'"):
        parse_caption(caption)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_scene_and_its_inverse_have_one_canonical_form(relation: str) -> None:
    inverse = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[relation]
    scene = Scene((BLUE_SQUARE, RED_DIAMOND), relation)
    assert scene.canonical() == Scene((RED_DIAMOND, BLUE_SQUARE), inverse).canonical()
    assert scene.canonical().relation in ("left of", "above")


def test_a_small_picture_is_drawn_as_by_hand() -> None:
    square = OBJECTS.index(ShapeObject("small", "red", "square"))
    image = draw([square], [(4, 6)], 40)
    expected = np.full((3, 40, 40), 255, dtype=np.uint8)
    expected[:, 4:12, 6:14] = np.array([215, 25, 30])[:, None, None]
    np.testing.assert_array_equal(image, expected)


def test_masks_cover_the_areas_of_their_shapes() -> None:
    side = sprite_side("large", 256)
    # The share of the bounding box that each shape covers; sampling 8 x 8 points a pixel leaves less than a percent.
    for shape, share in {"square": 1.0, "triangle": 0.5, "diamond": 0.5, "cross": 2 * 0.25 - 0.25**2}.items():
        assert shape_mask("large", shape, 256).sum() / side**2 == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("image_size", [24, 32, 45, 64])
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("first_size", SIZES)
def test_two_objects_stay_in_the_picture_and_apart(image_size: int, relation: str, first_size: str) -> None:
    scene = Scene((ShapeObject(first_size, "red", "diamond"), BLUE_SQUARE), relation)
    generator = np.random.default_rng(0)
    for _ in range(100):
        corners = np.array(place(scene, image_size, generator))
        sides = np.array([sprite_side(item.size, image_size) for item in scene.objects])
        assert (corners >= 0).all()
        assert (corners + sides[:, None] <= image_size).all()
        axis = 1 if relation in ("left of", "right of") else 0
        before, after = (0, 1) if relation in ("left of", "above") else (1, 0)
        assert corners[before, axis] + sides[before] < corners[after, axis]
        middles = corners + sides[:, None] / 2
        assert abs(np.diff(middles[:, axis])) > abs(np.diff(middles[:, 1 - axis]))


def patches(scenes: list[Scene]) -> set[bytes]:
    generator = np.random.default_rng(0)
    images = np.stack([render(scene, 40, generator) for scene in scenes])
    split = images.reshape(-1, 3, 10, 4, 10, 4).transpose(0, 2, 4, 1, 3, 5)
    return {patch.tobytes() for patch in np.unique(split.reshape(-1, 3 * 4 * 4), axis=0)}


def test_held_out_objects_are_made_of_patches_that_trained_ones_have() -> None:
    trained = patches(trained_scenes(1) * 40)
    assert patches(held_out_scenes(1) * 40) <= trained
    # Few enough for a small codebook.
    assert len(trained) < 320


def test_pictures_depend_on_the_generator_alone() -> None:
    scene = Scene((BLUE_SQUARE,))
    pictures = [render(scene, 32, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()


def test_a_picture_too_small_for_its_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image_size \(16\) must be at least 24"):
        render(Scene((BLUE_SQUARE,)), 16, np.random.default_rng(0))
