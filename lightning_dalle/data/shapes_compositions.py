"""Which compositions of shapes are trained on, and which are kept to judge generalisation.

The split is a constant of the data set, the same for every seed, so figures of different runs can be compared.
"""

import functools
import itertools
from dataclasses import astuple

import numpy as np

from lightning_dalle.data.shapes import INVERSE_RELATION, OBJECTS, Scene, ShapeObject
from lightning_dalle.data.split_by_name import hash_unit

NUM_HELD_OUT_OBJECTS = 12
HELD_OUT_PAIR_SHARE = 0.15


@functools.cache
def held_out_objects() -> frozenset[ShapeObject]:
    """Objects never drawn for training, alone or in a pair.

    No two of them share two words, so that any two words are still trained on with all of the third kind but one. Were
    only one left, those two words would tell it, and a model that ignored the third would be right in training.
    """
    chosen: list[ShapeObject] = []
    for candidate in sorted(OBJECTS, key=lambda item: hash_unit(item.phrase)):
        if all(_num_shared_words(candidate, other) < 2 for other in chosen):
            chosen.append(candidate)
        if len(chosen) == NUM_HELD_OUT_OBJECTS:
            break
    return frozenset(chosen)


def _num_shared_words(first: ShapeObject, second: ShapeObject) -> int:
    return sum(one == other for one, other in zip(astuple(first), astuple(second), strict=True))


@functools.cache
def _is_held_out_pair(first: ShapeObject, second: ShapeObject) -> bool:
    """Whether two known objects are never trained on together, in any relation."""
    return hash_unit(" and ".join(sorted((first.phrase, second.phrase)))) < HELD_OUT_PAIR_SHARE


def is_trained(scene: Scene) -> bool:
    """Whether training may show this composition."""
    if any(item in held_out_objects() for item in scene.objects):
        return False
    return len(scene.objects) == 1 or not _is_held_out_pair(scene.objects[0], scene.objects[1])


@functools.cache
def _known_scenes(num_objects: int) -> tuple[Scene, ...]:
    """Every scene of one object; every scene of two different ones, said in each of its two ways."""
    if num_objects == 1:
        return tuple(Scene((item,)) for item in OBJECTS)
    pairs = itertools.permutations(OBJECTS, 2)
    return tuple(Scene(pair, relation) for pair in pairs for relation in ("left of", "right of", "above", "below"))


@functools.cache
def _split_scenes(num_objects: int) -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """The scenes that are trained on, and the others, among them those of an object that is held out itself."""
    known = _known_scenes(num_objects)
    trained = [is_trained(scene) for scene in known]
    return tuple(itertools.compress(known, trained)), tuple(itertools.compress(known, (not shown for shown in trained)))


def trained_scenes(num_objects: int) -> list[Scene]:
    """The training compositions of one or of two objects."""
    return list(_split_scenes(num_objects)[0])


def held_out_scenes(num_objects: int) -> list[Scene]:
    """Compositions never trained on.

    Of one object: its three words never met. Of two: both objects are trained on, but never in one picture.
    """
    _, others = _split_scenes(num_objects)
    if num_objects == 1:
        return list(others)
    unseen = held_out_objects()
    return [scene for scene in others if not any(item in unseen for item in scene.objects)]


def negative_scene(scene: Scene, generator: np.random.Generator) -> Scene:
    """What the scene is not, but nearly: the opposite relation, or one object that training shows with another word."""
    if scene.relation is not None:
        return Scene(scene.objects, INVERSE_RELATION[scene.relation])
    near = _near_objects(scene.objects[0])
    return Scene((near[int(generator.integers(len(near)))],))


@functools.cache
def _near_objects(item: ShapeObject) -> list[ShapeObject]:
    """Objects that training may show and that differ in one word."""
    return [other for other in OBJECTS if _num_shared_words(item, other) == 2 and other not in held_out_objects()]
