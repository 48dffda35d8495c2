"""Reads drawn shapes back from pixels, so that generated pictures are evaluated by what they show.

Each picture is explained greedily by templates (the very masks that were drawn, in each colour, at each pixel): the one
that lowers the squared error most is taken out, then the next. What is left must be small, else nothing is read.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn import functional

from lightning_dalle.data.shapes.scenes import INVERSE_RELATION, OBJECTS, Scene, draw, parse_caption, sprite_side

# Blur fades small objects: one may be as faint as this share of its colour, and fainter is no object.
MIN_CONTRAST = 0.55
BATCH_SIZE = 128


@dataclass(frozen=True)
class Detections:
    """The object that explains each picture best."""

    item: Tensor
    """[batch] position among the templates."""
    row: Tensor
    column: Tensor
    contrast: Tensor
    """[batch] least-squares strength of the object: 1 as drawn, 0 invisible."""


@functools.cache
def _templates(image_size: int) -> Float[Tensor, "objects 3 side side"]:
    """Darkness (1 - value) of every object, in the upper left of the largest one's box, in the order of OBJECTS."""
    box = sprite_side("large", image_size)
    pictures = torch.stack([torch.from_numpy(draw([index], [(0, 0)], image_size)) for index in range(len(OBJECTS))])
    return 1 - pictures[:, :, :box, :box].float() / 255


def detect(
    darkness: Float[Tensor, "batch 3 height width"], templates: Float[Tensor, "objects 3 side side"], margin: int = 0
) -> Detections:
    """Return the object and place that lower the squared error of each picture most.

    Args:
        margin: How far a template's box may reach over the right and lower border, where it is empty.
    """
    energies = templates.square().sum(dim=(1, 2, 3))[:, None, None]
    contrast = functional.conv2d(functional.pad(darkness, (0, margin, 0, margin)), templates) / energies
    strength = contrast.clamp(MIN_CONTRAST, 1)
    gain = (2 * contrast - strength) * strength * energies
    best = gain.flatten(1).argmax(dim=1)
    item, row, column = torch.unravel_index(best, gain.shape[1:])
    return Detections(item, row, column, contrast.flatten(1).gather(1, best[:, None])[:, 0])


def erase(
    darkness: Float[Tensor, "batch 3 height width"],
    found: Detections,
    templates: Float[Tensor, "objects 3 side side"],
) -> Float[Tensor, "batch 3 height width"]:
    """Return the pictures less the detected objects, where one was found."""
    height, width = darkness.shape[-2:]
    box = templates.shape[-1]
    canvas = functional.pad(darkness, (0, box, 0, box))
    strength = found.contrast.clamp(max=1) * (found.contrast >= MIN_CONTRAST)
    drawn = templates[found.item] * strength[:, None, None, None]
    for picture, row, column, stamp in zip(canvas, found.row.tolist(), found.column.tolist(), drawn, strict=True):
        picture[:, row : row + box, column : column + box] -= stamp
    return canvas[:, :, :height, :width]


def _scene(found: Sequence[Detections], index: int, image_size: int) -> Scene | None:
    """Return the scene of one picture: one or two objects, None for none or more than two."""
    objects, middles = [], []
    for detections in found:
        if detections.contrast[index] < MIN_CONTRAST:
            break
        objects.append(OBJECTS[int(detections.item[index])])
        half = sprite_side(objects[-1].size, image_size) / 2
        middles.append((float(detections.row[index]) + half, float(detections.column[index]) + half))
    if not 1 <= len(objects) <= 2:
        return None
    if len(objects) == 1:
        return Scene((objects[0],))
    down, right = middles[1][0] - middles[0][0], middles[1][1] - middles[0][1]
    if abs(right) > abs(down):
        relation = "left of" if right > 0 else "right of"
    else:
        relation = "above" if down > 0 else "below"
    return Scene((objects[0], objects[1]), relation).canonical()


@torch.no_grad()
def read_scenes(images: UInt8[Tensor, "batch 3 size size"]) -> list[Scene | None]:
    """Return the scene of each picture, said with `left of` or `above`; None where not one or two can be read."""
    size = images.shape[-1]
    templates = _templates(size)
    # Small objects may stand nearer to the right and lower border than the templates' common box.
    margin = templates.shape[-1] - sprite_side("small", size)
    scenes: list[Scene | None] = []
    for chunk in images.split(BATCH_SIZE):
        darkness = 1 - chunk.cpu().float() / 255
        found = []
        for _ in range(3):
            found.append(detect(darkness, templates, margin))
            darkness = erase(darkness, found[-1], templates)
        scenes += [_scene(found, index, size) for index in range(len(chunk))]
    return scenes


def matches_each(images: UInt8[Tensor, "batch 3 size size"], captions: Sequence[str]) -> Bool[Tensor, " batch"]:
    """Return whether each picture shows wholly what its caption says; `A left of B` and `B right of A` are the same."""
    wanted = [parse_caption(caption).canonical() for caption in captions]
    agree = [scene == want for scene, want in zip(read_scenes(images), wanted, strict=True)]
    return torch.tensor(agree, dtype=torch.bool)


def matches(image: UInt8[Tensor, "3 size size"], caption: str) -> bool:
    """Return whether one picture shows wholly what its caption says."""
    return bool(matches_each(image[None], [caption])[0])


def _attribute_shares(scene: Scene | None, wanted: Scene) -> dict[str, float]:
    """Return the share of the wanted objects whose size, colour, shape is right, and whether the relation is."""
    names = ("size", "colour", "shape")
    worst = dict.fromkeys((*names, "relation"), 0.0)
    if scene is None:
        return worst
    orders = [scene] if scene.relation is None else [scene, _said_backwards(scene)]
    best = worst
    for order in orders:
        pairs = list(zip(order.objects, wanted.objects, strict=False))
        shares = {
            name: sum(getattr(seen, name) == getattr(want, name) for seen, want in pairs) / len(wanted.objects)
            for name in names
        }
        shares["relation"] = float(order.relation == wanted.relation)
        if sum(shares.values()) > sum(best.values()):
            best = shares
    return best


def _said_backwards(scene: Scene) -> Scene:
    assert scene.relation is not None
    return Scene(scene.objects[::-1], INVERSE_RELATION[scene.relation])


def attribute_shares(images: UInt8[Tensor, "batch 3 size size"], captions: Sequence[str]) -> dict[str, float]:
    """Mean over pictures of the shares of sizes, colours, shapes and relations that are right.

    The two objects are paired with the caption's in the order that suits the picture best. For captions of one object,
    `relation` says whether the picture shows one object only.

    Raises:
        ValueError: there are no pictures.
    """
    if not captions:
        raise ValueError("captions must not be empty: there is no mean over no pictures")
    scenes = read_scenes(images)
    shares = [_attribute_shares(scene, parse_caption(caption)) for scene, caption in zip(scenes, captions, strict=True)]
    return {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
