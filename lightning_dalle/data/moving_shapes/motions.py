"""Clips of one drawn shape that moves: their words, their captions, their frames, and which are never trained on.

A shape moves by whole pixels, a fixed share of the picture's shorter side in each frame, whatever the number of frames
and the shape of the picture: a longer clip shows more of the same motion, not a slower one.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.shapes.scenes import (
    COLOURS,
    MIN_IMAGE_SIZE,
    OBJECT_INDEX,
    SHAPES,
    ShapeObject,
    sprite_side,
    sprites,
    start_between,
)
from lightning_dalle.data.splits import hash_unit

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Steps in rows and columns."""
AXES = {"left": "horizontal", "right": "horizontal", "up": "vertical", "down": "vertical"}
SPEEDS = ("slowly", "fast")
SIZE = "medium"
"""Of every shape: the words are about motion."""
NUM_HELD_OUT_MOTIONS = 24

_CAPTION = re.compile(
    rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) moving ({'|'.join(DIRECTIONS)}) ({'|'.join(SPEEDS)})"
)


@dataclass(frozen=True)
class ShapeMotion:
    """One moving shape, by its four words."""

    colour: str
    shape: str
    direction: str
    speed: str

    @property
    def caption(self) -> str:
        """The sentence that `parse_motion` reads back."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} moving {self.direction} {self.speed}"

    @property
    def item(self) -> int:
        """The shape's place in `OBJECTS`."""
        return OBJECT_INDEX[ShapeObject(SIZE, self.colour, self.shape)]


MOTIONS = tuple(ShapeMotion(*words) for words in itertools.product(COLOURS, SHAPES, DIRECTIONS, SPEEDS))


def parse_motion(caption: str) -> ShapeMotion:
    """Return the motion that a caption describes; case and spacing do not matter.

    Raises:
        ValueError: the caption is not of the grammar `a COLOUR SHAPE moving DIRECTION SPEED`.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()))
    if match is None:
        raise ValueError(
            f"caption ({caption!r}) does not describe a moving shape; write it like 'a red square moving left slowly'"
        )
    return ShapeMotion(*match.groups())


@functools.cache
def held_out_motions() -> tuple[ShapeMotion, ...]:
    """Motions never trained on, the same for every seed.

    No two of them share three words, so that any three words are still trained on with all of the fourth kind but one.
    """
    chosen: list[ShapeMotion] = []
    for candidate in sorted(MOTIONS, key=lambda motion: hash_unit(motion.caption)):
        if all(_num_shared_words(candidate, other) < 3 for other in chosen):
            chosen.append(candidate)
        if len(chosen) == NUM_HELD_OUT_MOTIONS:
            break
    return tuple(sorted(chosen, key=MOTIONS.index))


def trained_motions() -> tuple[ShapeMotion, ...]:
    """Return all other motions."""
    return tuple(motion for motion in MOTIONS if motion not in held_out_motions())


def _num_shared_words(first: ShapeMotion, second: ShapeMotion) -> int:
    return sum(one == other for one, other in zip(astuple(first), astuple(second), strict=True))


def pixels_per_frame(speed: str, size: int) -> int:
    """Return how far a shape moves from one frame to the next, where the picture's shorter side is `size`."""
    return round(size / 32) * (1 + SPEEDS.index(speed))


def most_frames(height: int, width: int) -> int:
    """Frames of the longest clip in which a fast shape stays in the picture."""
    size = min(height, width)
    return 1 + (size - sprite_side(SIZE, size)) // pixels_per_frame("fast", size)


def check_clip_shape(frames: int, height: int, width: int) -> None:
    """Refuse clips in which motion cannot be seen, or leads out of the picture.

    Raises:
        ValueError: the message names the argument.
    """
    for name, value in (("height", height), ("width", width)):
        if value < MIN_IMAGE_SIZE:
            raise ValueError(f"{name} ({value}) must be at least {MIN_IMAGE_SIZE}, or the shapes look alike")
    most = most_frames(height, width)
    if not 2 <= frames <= most:
        raise ValueError(
            f"frames ({frames}) must be between 2, to show motion, and {most}, after which a fast shape leaves a "
            f"picture of {height} x {width}"
        )


def place_motion(
    motion: ShapeMotion, frames: int, height: int, width: int, generator: np.random.Generator
) -> tuple[int, int]:
    """Return a random upper left corner (row, column) in the first frame.

    The middle of the path lies within 1/8 of the picture's middle, as far as the path stays inside.
    """
    size = min(height, width)
    side, step = sprite_side(SIZE, size), pixels_per_frame(motion.speed, size)
    corner = []
    for length, sign in zip((height, width), DIRECTIONS[motion.direction], strict=True):
        travel = sign * step * (frames - 1)
        middle = (length - side - travel) / 2
        low, high = max(0, -travel), length - side - max(0, travel)
        corner.append(start_between(generator, (max(low, middle - length / 8), min(high, middle + length / 8)), 1))
    return corner[0], corner[1]


def draw_motion(
    motion: ShapeMotion, corner: tuple[int, int], frames: int, height: int, width: int
) -> UInt8[np.ndarray, "3 frames height width"]:
    """Return the clip that begins at a corner, on white."""
    size = min(height, width)
    sprite, step = sprites(size)[motion.item], pixels_per_frame(motion.speed, size)
    side = sprite.shape[1]
    clip = np.full((3, frames, height, width), 255, dtype=np.uint8)
    for frame in range(frames):
        row, column = (
            start + sign * step * frame for start, sign in zip(corner, DIRECTIONS[motion.direction], strict=True)
        )
        clip[:, frame, row : row + side, column : column + side] = sprite
    return clip


def draw_motions(
    motions: Sequence[ShapeMotion], frames: int, height: int, width: int, generator: np.random.Generator
) -> UInt8[np.ndarray, "motions 3 frames height width"]:
    """Return a random clip of each motion.

    Example:
        >>> draw_motions([MOTIONS[0]], 8, 32, 48, np.random.default_rng(0)).shape
        (1, 3, 8, 32, 48)
    """
    corners = [place_motion(motion, frames, height, width, generator) for motion in motions]
    pairs = zip(motions, corners, strict=True)
    return np.stack([draw_motion(motion, corner, frames, height, width) for motion, corner in pairs])
