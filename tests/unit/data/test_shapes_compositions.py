from itertools import chain

import pytest

from lightning_dalle.data.shapes import COLOURS, OBJECTS, SHAPES, SIZES, Scene
from lightning_dalle.data.shapes_compositions import (
    NUM_HELD_OUT_OBJECTS,
    held_out_objects,
    held_out_scenes,
    is_trained,
    object_counts,
    trained_scenes,
)


def canonical(scenes: list[Scene]) -> set[Scene]:
    return {scene.canonical() for scene in scenes}


@pytest.mark.parametrize("num_objects", [1, 2])
def test_no_composition_is_both_trained_on_and_held_out(num_objects: int) -> None:
    trained, held_out = canonical(trained_scenes(num_objects)), canonical(held_out_scenes(num_objects))
    assert trained
    assert held_out
    assert not trained & held_out


def test_scenes_of_one_object_are_all_there() -> None:
    assert len(held_out_scenes(1)) == NUM_HELD_OUT_OBJECTS
    assert len(trained_scenes(1)) + len(held_out_scenes(1)) == len(OBJECTS) == 48


def test_held_out_objects_appear_in_no_training_picture() -> None:
    trained = trained_scenes(1) + trained_scenes(2)
    assert not held_out_objects() & set(chain.from_iterable(scene.objects for scene in trained))


def test_held_out_pairs_are_of_trained_objects_never_seen_together() -> None:
    together = {frozenset(scene.objects) for scene in trained_scenes(2)}
    alone = {scene.objects[0] for scene in trained_scenes(1)}
    for scene in held_out_scenes(2):
        assert set(scene.objects) <= alone
        assert frozenset(scene.objects) not in together


def test_every_word_is_trained_on_in_most_of_its_objects() -> None:
    for word in SIZES + COLOURS + SHAPES:
        bearers = [item for item in OBJECTS if word in (item.size, item.colour, item.shape)]
        assert sum(is_trained(Scene((item,))) for item in bearers) >= 2 / 3 * len(bearers)


def test_the_split_is_the_published_one() -> None:
    """Figures of different versions are compared: the split must not move."""
    assert sorted(item.phrase for item in held_out_objects()) == [
        "a large blue triangle",
        "a large green cross",
        "a large green square",
        "a large purple cross",
        "a large red cross",
        "a large red triangle",
        "a small orange square",
        "a small yellow cross",
    ]
    assert (len(trained_scenes(2)), len(held_out_scenes(2))) == (5272, 968)


def test_an_unknown_number_of_objects_is_refused() -> None:
    assert object_counts("both") == (1, 2)
    with pytest.raises(ValueError, match=r"objects \('three'\) must be one of one, two, both"):
        object_counts("three")  # type: ignore[arg-type]
