"""Reads moving shapes back from pixels, so that generated clips are evaluated by what they show.

Frames are read one by one with the templates of `shapes_oracle`; words on which most frames agree are the clip's, and a
line through the places is its motion. What frames do not agree on is left unread.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from lightning_dalle.data.moving_shapes.motions import (
    AXES,
    DIRECTIONS,
    SIZE,
    SPEEDS,
    ShapeMotion,
    parse_motion,
    pixels_per_frame,
)
from lightning_dalle.data.shapes.oracle import BATCH_SIZE, MIN_CONTRAST, detect, erase
from lightning_dalle.data.shapes.scenes import OBJECTS, sprites

MIN_AGREEMENT = 0.75
"""Share of the frames that must show exactly one object, and of those that must agree on a word."""
MAX_REST = 0.5
"""Squared error that one object may leave unexplained in a frame, in shares of the object's own."""
MAX_JITTER = 1.0
"""Root mean squared distance of the places from their line, in steps of a slow shape."""
ATTRIBUTES = ("colour", "shape", "axis", "direction", "speed")

_ITEMS = tuple(index for index, item in enumerate(OBJECTS) if item.size == SIZE)


@dataclass(frozen=True)
class MotionReading:
    """What a clip shows; None is what cannot be read."""

    colour: str | None = None
    shape: str | None = None
    direction: str | None = None
    speed: str | None = None

    @property
    def axis(self) -> str | None:
        """`horizontal` or `vertical`."""
        return None if self.direction is None else AXES[self.direction]

    def shows(self, motion: ShapeMotion) -> bool:
        """Return whether all four words are those of the motion."""
        return self == MotionReading(motion.colour, motion.shape, motion.direction, motion.speed)


@functools.cache
def _templates(size: int) -> Float[Tensor, "objects 3 side side"]:
    """Darkness (1 - value) of every object that moves."""
    return 1 - torch.from_numpy(np.stack([sprites(size)[item] for item in _ITEMS])).float() / 255


@dataclass(frozen=True)
class _Frames:
    """What each frame of a chunk shows: [frames] each."""

    item: Tensor
    place: Tensor
    """[frames, 2] row and column."""
    is_plain: Tensor
    """Whether there is one object, and nothing else."""


def _read_frames(darkness: Float[Tensor, "frames 3 height width"], size: int) -> _Frames:
    templates = _templates(size)
    found = detect(darkness, templates)
    rest = erase(darkness, found, templates)
    unexplained = rest.square().sum(dim=(1, 2, 3)) / templates[found.item].square().sum(dim=(1, 2, 3))
    another = detect(rest, templates).contrast >= MIN_CONTRAST
    is_plain = (found.contrast >= MIN_CONTRAST) & ~another & (unexplained <= MAX_REST)
    return _Frames(found.item, torch.stack([found.row, found.column], dim=1), is_plain)


def _agreed(words: Iterable[str]) -> str | None:
    """Return the word of most frames."""
    counts = Counter(words)
    word, count = counts.most_common(1)[0]
    return word if count >= MIN_AGREEMENT * counts.total() else None


def _motion(times: np.ndarray, places: np.ndarray, size: int) -> tuple[str | None, str | None]:
    """Direction and speed of the line through the places, None where they are none of the known ones."""
    step = pixels_per_frame(SPEEDS[0], size)
    design = np.stack([times, np.ones_like(times)], axis=1)
    line = np.linalg.lstsq(design, places / step, rcond=None)[0]
    jitter = np.sqrt(np.square(places / step - design @ line).sum(axis=1).mean())
    velocity = line[0]
    along, across = np.abs(velocity).max(), np.abs(velocity).min()
    if jitter > MAX_JITTER or along < 0.5 or across > along / 2:
        return None, None
    main = int(np.abs(velocity).argmax())
    signs = tuple(int(np.sign(velocity[axis])) if axis == main else 0 for axis in range(2))
    direction = next(name for name, step_signs in DIRECTIONS.items() if step_signs == signs)
    # Speeds are one and two steps a frame, and what rounds to neither is none.
    speed = SPEEDS[round(along) - 1] if 1 <= round(along) <= len(SPEEDS) else None
    return direction, speed


def _reading(items: Sequence[int], places: np.ndarray, is_plain: np.ndarray, size: int) -> MotionReading:
    """Return one clip from its frames."""
    times = np.flatnonzero(is_plain)
    if len(times) < max(2, MIN_AGREEMENT * len(is_plain)):
        return MotionReading()
    objects = [OBJECTS[_ITEMS[items[time]]] for time in times.tolist()]
    direction, speed = _motion(times.astype(np.float64), places[times].astype(np.float64), size)
    return MotionReading(
        _agreed(item.colour for item in objects), _agreed(item.shape for item in objects), direction, speed
    )


@torch.no_grad()
def read_motions(video: UInt8[Tensor, "batch 3 frames height width"]) -> list[MotionReading]:
    """Return what each clip shows."""
    num_frames, height, width = video.shape[2:]
    size = min(height, width)
    readings: list[MotionReading] = []
    for clips in video.split(max(1, BATCH_SIZE // num_frames)):
        frames = _read_frames(1 - clips.cpu().float().transpose(1, 2).flatten(0, 1) / 255, size)
        parts = (part.unflatten(0, (len(clips), num_frames)) for part in (frames.item, frames.place, frames.is_plain))
        for items, places, is_plain in zip(*parts, strict=True):
            readings.append(_reading(items.tolist(), places.numpy(), is_plain.numpy(), size))
    return readings


def matches_each(
    video: UInt8[Tensor, "batch 3 frames height width"], captions: Sequence[str]
) -> Bool[Tensor, " batch"]:
    """Return whether each clip shows wholly what its caption says."""
    pairs = zip(read_motions(video), captions, strict=True)
    return torch.tensor([reading.shows(parse_motion(caption)) for reading, caption in pairs], dtype=torch.bool)


def attribute_shares(video: UInt8[Tensor, "batch 3 frames height width"], captions: Sequence[str]) -> dict[str, float]:
    """Return the shares of clips whose colour, shape, axis, direction (axis and sign) and speed are the caption's.

    Raises:
        ValueError: there are no clips.
    """
    if not captions:
        raise ValueError("captions must not be empty: there is no mean over no clips")
    wanted = [MotionReading(*vars(parse_motion(caption)).values()) for caption in captions]
    pairs = list(zip(read_motions(video), wanted, strict=True))
    return {
        name: sum(getattr(reading, name) == getattr(want, name) for reading, want in pairs) / len(pairs)
        for name in ATTRIBUTES
    }
