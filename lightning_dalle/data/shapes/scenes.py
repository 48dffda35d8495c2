"""Scenes of coloured shapes: captions, drawings, and which compositions are held out."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import Float, UInt8

from lightning_dalle.data.splits import hash_unit

SIZES = ("small", "medium", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("square", "triangle", "diamond", "cross")
RELATIONS = ("left of", "right of", "above", "below")
INVERSE_RELATION = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

COLOUR_VALUES = np.array(
    [[215, 25, 30], [20, 150, 50], [30, 70, 220], [255, 225, 25], [145, 30, 180], [255, 140, 0]], dtype=np.uint8
)
# Side of the bounding box as a share of the image: two large objects and a gap fit side by side.
SIZE_SHARES = {"small": 0.2, "medium": 0.3, "large": 0.4}
CROSS_ARM_SHARE = 0.1
MIN_IMAGE_SIZE = 24

_NOUN = rf"an? ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_CAPTION = re.compile(rf"{_NOUN}(?: ({'|'.join(RELATIONS)}) {_NOUN})?")


@dataclass(frozen=True)
class ShapeObject:
    """One object, by its three words."""

    size: str
    colour: str
    shape: str

    @property
    def phrase(self) -> str:
        """Its words in a caption."""
        return f"a {self.size} {self.colour} {self.shape}"


OBJECTS = tuple(ShapeObject(*words) for words in itertools.product(SIZES, COLOURS, SHAPES))
OBJECT_INDEX = {shape_object: index for index, shape_object in enumerate(OBJECTS)}


@dataclass(frozen=True)
class Scene:
    """One object, or two and how the first lies to the second."""

    objects: tuple[ShapeObject, ...]
    relation: str | None = None

    @property
    def caption(self) -> str:
        """The sentence that `parse_caption` reads back."""
        return f" {self.relation} ".join(shape_object.phrase for shape_object in self.objects)

    def canonical(self) -> "Scene":
        """Return the same picture said with `left of` or `above`: `A right of B` is `B left of A`."""
        if self.relation in ("right of", "below"):
            return Scene(self.objects[::-1], INVERSE_RELATION[self.relation])
        return self


def parse_caption(caption: str) -> Scene:
    """Return the scene that a caption describes; case and spacing do not matter.

    Raises:
        ValueError: the caption is not of the grammar `a SIZE COLOUR SHAPE [RELATION a SIZE COLOUR SHAPE]`.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()))
    if match is None:
        raise ValueError(
            f"caption ({caption!r}) does not describe shapes; write it like "
            "'a small red square' or 'a large blue square above a small red square'"
        )
    first, relation, second = match.group(1, 2, 3), match.group(4), match.group(5, 6, 7)
    if relation is None:
        return Scene((ShapeObject(*first),))
    return Scene((ShapeObject(*first), ShapeObject(*second)), relation)


def sprite_side(size: str, image_size: int) -> int:
    """Side of an object's bounding box in pixels."""
    return round(SIZE_SHARES[size] * image_size)


def _inside(shape: str, x: np.ndarray, y: np.ndarray, arm: float) -> np.ndarray:
    """Return whether points of [-1, 1]^2 (y grows downwards) lie in the shape; a cross has arms 2 * arm wide."""
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= 1
    if shape == "triangle":
        return np.abs(x) <= (y + 1) / 2
    if shape == "diamond":
        return np.abs(x) + np.abs(y) <= 1
    return np.minimum(np.abs(x), np.abs(y)) <= arm


@functools.cache
def shape_mask(size: str, shape: str, image_size: int) -> Float[np.ndarray, "side side"]:
    """Return the share of each pixel that the shape covers, by 8 x 8 samples a pixel."""
    side, samples = sprite_side(size, image_size), 8
    axis = (np.arange(side * samples) + 0.5) / (side * samples) * 2 - 1
    covered = _inside(shape, axis[None, :], axis[:, None], CROSS_ARM_SHARE * image_size / side)
    return covered.reshape(side, samples, side, samples).mean(axis=(1, 3))


@functools.cache
def sprites(image_size: int) -> tuple[np.ndarray, ...]:
    """Return all objects on white as uint8 [3, side, side], in the order of `OBJECTS`."""
    if image_size < MIN_IMAGE_SIZE:
        raise ValueError(
            f"image_size ({image_size}) must be at least {MIN_IMAGE_SIZE}: below that the shapes look alike"
        )
    drawn = []
    for item in OBJECTS:
        mask = shape_mask(item.size, item.shape, image_size)
        colour = COLOUR_VALUES[COLOURS.index(item.colour)].astype(np.float64)
        drawn.append(np.rint(255 + mask * (colour[:, None, None] - 255)).astype(np.uint8))
    return tuple(drawn)


def draw(
    objects: Sequence[int], corners: Sequence[tuple[int, int]], image_size: int
) -> UInt8[np.ndarray, "3 height width"]:
    """Stamp objects (positions in `OBJECTS`) with their upper left corners at (row, column) on white."""
    image = np.full((3, image_size, image_size), 255, dtype=np.uint8)
    for index, (row, column) in zip(objects, corners, strict=True):
        sprite = sprites(image_size)[index]
        image[:, row : row + sprite.shape[1], column : column + sprite.shape[2]] = sprite
    return image


def start_between(generator: np.random.Generator, bounds: tuple[float, float], step: int) -> int:
    """Return a random multiple of the step within the bounds."""
    low, high = bounds
    first, last = int(np.ceil(low / step)), int(np.floor(high / step))
    return int(generator.integers(first, max(first, last) + 1)) * step


def place(scene: Scene, image_size: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Random corners for the scene's objects, one (row, column) each, on a lattice of 1/16 of the image.

    A lone object has its middle within 1/8 of the image's middle. Of two, each stays in its own half along the axis of
    the relation, and within 1/8 of the middle across it: boxes never meet and the relation is plain.
    """
    middle, eighth, gap, step = image_size / 2, image_size / 8, image_size / 32, image_size // 16
    corners = []
    for position, item in enumerate(scene.objects):
        side = sprite_side(item.size, image_size)
        across = (middle - eighth - side / 2, middle + eighth - side / 2)
        in_first_half = (position == 0) == (scene.relation in ("left of", "above"))
        along = (0, middle - gap - side) if in_first_half else (middle + gap, image_size - side)
        rows = along if scene.relation in ("above", "below") else across
        columns = along if scene.relation in ("left of", "right of") else across
        corners.append((start_between(generator, rows, step), start_between(generator, columns, step)))
    return corners


def render(scene: Scene, image_size: int, generator: np.random.Generator) -> UInt8[np.ndarray, "3 height width"]:
    """Return a random picture of the scene.

    Example:
        >>> render(parse_caption("a small red square"), 32, np.random.default_rng(0)).shape
        (3, 32, 32)
    """
    corners = place(scene, image_size, generator)
    return draw([OBJECT_INDEX[item] for item in scene.objects], corners, image_size)


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
    """Return whether two known objects are never trained on together, in any relation."""
    return hash_unit(" and ".join(sorted((first.phrase, second.phrase)))) < HELD_OUT_PAIR_SHARE


def is_trained(scene: Scene) -> bool:
    """Return whether training may show this composition."""
    if any(item in held_out_objects() for item in scene.objects):
        return False
    return len(scene.objects) == 1 or not _is_held_out_pair(scene.objects[0], scene.objects[1])


@functools.cache
def _known_scenes(num_objects: int) -> tuple[Scene, ...]:
    """Return every scene of one object; every scene of two different ones, said in each of its two ways."""
    if num_objects == 1:
        return tuple(Scene((item,)) for item in OBJECTS)
    pairs = itertools.permutations(OBJECTS, 2)
    return tuple(Scene(pair, relation) for pair in pairs for relation in ("left of", "right of", "above", "below"))


@functools.cache
def _split_scenes(num_objects: int) -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """Return the scenes that are trained on, and the others, among them those of an object that is held out itself."""
    known = _known_scenes(num_objects)
    trained = [is_trained(scene) for scene in known]
    return tuple(itertools.compress(known, trained)), tuple(itertools.compress(known, (not shown for shown in trained)))


def trained_scenes(num_objects: int) -> list[Scene]:
    """Return the training compositions of one or of two objects."""
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
    """Return what the scene is not, but nearly: the opposite relation, or a trained object with another word."""
    if scene.relation is not None:
        return Scene(scene.objects, INVERSE_RELATION[scene.relation])
    near = _near_objects(scene.objects[0])
    return Scene((near[int(generator.integers(len(near)))],))


@functools.cache
def _near_objects(item: ShapeObject) -> list[ShapeObject]:
    """Objects that training may show and that differ in one word."""
    return [other for other in OBJECTS if _num_shared_words(item, other) == 2 and other not in held_out_objects()]
