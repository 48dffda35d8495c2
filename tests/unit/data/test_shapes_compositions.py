from itertools import chain, product

import numpy as np
import pytest

from lightning_dalle.data.shapes.scenes import (
    COLOURS,
    NUM_HELD_OUT_OBJECTS,
    OBJECTS,
    SHAPES,
    SIZES,
    Scene,
    held_out_objects,
    held_out_scenes,
    is_trained,
    negative_scene,
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
    assert len(trained_scenes(1)) + len(held_out_scenes(1)) == len(OBJECTS) == 72


def test_held_out_objects_appear_in_no_training_picture() -> None:
    trained = trained_scenes(1) + trained_scenes(2)
    assert not held_out_objects() & set(chain.from_iterable(scene.objects for scene in trained))


def test_held_out_pairs_are_of_trained_objects_never_seen_together() -> None:
    together = {frozenset(scene.objects) for scene in trained_scenes(2)}
    alone = {scene.objects[0] for scene in trained_scenes(1)}
    for scene in held_out_scenes(2):
        assert set(scene.objects) <= alone
        assert frozenset(scene.objects) not in together


def test_any_two_words_are_trained_on_with_all_of_the_third_kind_but_one() -> None:
    for words in chain(product(SIZES, COLOURS), product(SIZES, SHAPES), product(COLOURS, SHAPES)):
        bearers = [item for item in OBJECTS if set(words) <= {item.size, item.colour, item.shape}]
        assert sum(not is_trained(Scene((item,))) for item in bearers) <= 1


def test_the_split_is_the_published_one() -> None:
    """Metrics of different versions are compared: the split must not move."""
    assert sorted(item.phrase for item in held_out_objects()) == [
        "a large blue triangle",
        "a large green square",
        "a large purple diamond",
        "a large red cross",
        "a medium blue diamond",
        "a medium green cross",
        "a medium red triangle",
        "a medium yellow square",
        "a small green triangle",
        "a small orange square",
        "a small red diamond",
        "a small yellow cross",
    ]
    assert (len(trained_scenes(2)), len(held_out_scenes(2))) == (11936, 2224)


def test_a_negative_is_nearly_the_scene_and_gives_no_held_out_object_away() -> None:
    generator = np.random.default_rng(0)
    for scene in trained_scenes(1) + trained_scenes(2)[::50] + held_out_scenes(1):
        negative = negative_scene(scene, generator)
        assert is_trained(negative)
        assert negative.canonical() != scene.canonical()
        words, negative_words = scene.caption.split(), negative.caption.split()
        assert len(words) == len(negative_words) or scene.relation is not None
        if scene.relation is None:
            assert sum(word != other for word, other in zip(words, negative_words, strict=True)) == 1
        else:
            assert negative.objects == scene.objects
