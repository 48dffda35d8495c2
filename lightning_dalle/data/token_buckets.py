"""Batches of clips of several sizes with about equally many tokens each."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from lightning_dalle.data.keyed_random import check_seed, keyed_numpy_generator

# Frames, height and width.
Size = tuple[int, int, int]


class TokenBuckets:
    """A batch sampler that shuffles by seed and epoch, and the collation that goes with it.

    With buckets a clip goes to the smallest that holds it, and is padded to it by its last frames, rows and columns;
    batches hold clips of one bucket. Without, clips stay as they are and a batch is a list, to be packed into one
    sequence. Either way every clip that is not dropped comes once in an epoch.

    Args:
        sizes: Of each clip of the set.
        max_tokens: Of a batch; a clip with more is dropped.
        token_size: Frames, rows and columns that make a token.
        buckets: Sizes that clips are padded to; None packs them.

    Raises:
        ValueError: If a number is out of range, or no batch is left.

    Example:
        >>> packed = TokenBuckets([(1, 2, 2), (2, 2, 2), (1, 2, 2)], max_tokens=8)
        >>> sorted(sorted(batch) for batch in packed) == sorted(sorted(batch) for batch in packed)
        True
        >>> len(TokenBuckets([(1, 2, 2), (2, 2, 2)], max_tokens=16, buckets=[(2, 2, 2)]))
        1
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        *,
        max_tokens: int,
        token_size: Size = (1, 1, 1),
        buckets: Sequence[Size] | None = None,
        seed: int = 0,
    ) -> None:
        if min(max_tokens, *token_size) < 1:
            raise ValueError(f"max_tokens ({max_tokens}) and token_size {token_size} must be at least 1")
        self.max_tokens, self.token_size, self.seed, self.epoch = max_tokens, token_size, check_seed(seed), 0
        self.buckets = None if buckets is None else sorted(map(_size, buckets), key=math.prod)
        self._targets = [self._target(_size(size)) for size in sizes]
        self._sizes = [_size(size) for size in sizes]
        self._kept = [index for index, target in enumerate(self._targets) if target is not None]
        if not self._kept:
            raise ValueError(
                f"no batch is left of {len(sizes)} clips; raise max_tokens ({max_tokens}).\n{self.report()}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of samples with `video` and `caption`; videos are padded to their bucket, or stay a list."""
        videos = [sample["video"] for sample in samples]
        batch: dict[str, Any] = {"video": videos, "caption": [sample["caption"] for sample in samples]}
        if self.buckets is not None:
            targets = [self._target((video.shape[1], video.shape[2], video.shape[3])) for video in videos]
            pairs = zip(videos, targets, strict=True)
            batch["video"] = torch.stack([pad_clip(video, target) for video, target in pairs if target is not None])
        return batch

    def report(self) -> str:
        """How many clips each size took, padded and dropped."""
        taken: Counter[Size] = Counter()
        padded: Counter[Size] = Counter()
        dropped: Counter[Size] = Counter()
        for size, target in zip(self._sizes, self._targets, strict=True):
            (dropped if target is None else taken)[target or size] += 1
            padded[target or size] += target is not None and target != size
        lines = [
            f"{' x '.join(map(str, size))}: {taken[size]} taken, {padded[size]} of them padded, {dropped[size]} dropped"
            for size in sorted({*taken, *dropped})
        ]
        return "\n".join(lines)

    def _target(self, size: Size) -> Size | None:
        """The size that a clip is brought to; None drops it."""
        choices = [size] if self.buckets is None else self.buckets
        holding = (each for each in choices if all(own <= room for own, room in zip(size, each, strict=True)))
        target = next(holding, None)
        return None if target is None or self._tokens(target) > self.max_tokens else target

    def _tokens(self, size: Size) -> int:
        return math.prod(-(-side // token) for side, token in zip(size, self.token_size, strict=True))

    def _batches(self) -> list[list[int]]:
        generator = keyed_numpy_generator(self.seed, self.epoch)
        order = [self._kept[place] for place in generator.permutation(len(self._kept))]
        # One open batch for each bucket; packed clips share one.
        opened: dict[Size | None, list[int]] = {}
        filled: Counter[Size | None] = Counter()
        batches = []
        for index in order:
            target = self._targets[index]
            assert target is not None
            bucket = None if self.buckets is None else target
            if filled[bucket] + self._tokens(target) > self.max_tokens:
                batches.append(opened.pop(bucket))
                filled[bucket] = 0
            opened.setdefault(bucket, []).append(index)
            filled[bucket] += self._tokens(target)
        batches += opened.values()
        return [batches[place] for place in generator.permutation(len(batches))]


def pad_clip(
    clip: Shaped[Tensor, "channels frames height width"], size: Size
) -> Shaped[Tensor, "channels padded_frames padded_height padded_width"]:
    """The clip with its last frames, rows and columns repeated up to `size`."""
    for dim, side in enumerate(size, start=1):
        places = torch.arange(side, device=clip.device).clamp(max=clip.shape[dim] - 1)
        clip = clip.index_select(dim, places)
    return clip


def _size(size: Sequence[int]) -> Size:
    frames, height, width = size
    return frames, height, width
