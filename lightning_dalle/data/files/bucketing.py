"""Clips of mixed sizes in batches of nearly equal numbers of tokens."""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dalle.data.files.decoding import ClipExtent, ClipShape
from lightning_dalle.ops.random import check_seed, keyed_numpy_generator

# Frames, height and width.
Size = tuple[int, int, int]


class TokenBuckets:
    """A batch sampler that shuffles by seed and epoch, and the collation that goes with it.

    With buckets a clip goes to the smallest that holds it, and is padded to it by its last frames, rows and columns;
    batches hold clips of one bucket. Without, clips stay as they are and a batch is a list, to be packed into one
    sequence. Either way every clip that is not dropped comes once in an epoch, and all epochs have equally many
    batches, as Trainers expect: an epoch lets clips of equally many tokens change places in batches that were laid out
    once. `CaptionedVideosDataModule` makes its batches so; a loader of your own takes it as its `batch_sampler`.

    Args:
        sizes: Sizes of each clip of the set.
        max_tokens: Tokens of a batch at most; a clip with more is dropped.
        token_size: Frames, rows and columns that make a token.
        buckets: Sizes that clips are padded to; None packs them.
        shuffle: Whether to; else clips come in their order, as far as buckets leave it.

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
        shuffle: bool = True,
    ) -> None:
        check_tokens(max_tokens, token_size)
        self.max_tokens, self.token_size, self.seed, self.epoch = max_tokens, token_size, check_seed(seed), 0
        self.shuffle = shuffle
        self.buckets = None if buckets is None else sorted(map(_size, buckets), key=math.prod)
        self._targets = [self._target(_size(size)) for size in sizes]
        self._sizes = [_size(size) for size in sizes]
        self._kept = [index for index, target in enumerate(self._targets) if target is not None]
        if not self._kept:
            raise ValueError(
                f"no batch is left of {len(sizes)} clips; raise max_tokens ({max_tokens}).\n{self.report()}"
            )
        self._layout = self._lay_out()
        self._drawn: tuple[int, list[list[int]]] | None = None

    @property
    def sampler(self) -> "TokenBuckets":
        """Itself: Trainers tell the epoch to the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._layout)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __getitem__(self, number: int) -> list[int]:
        return self._batches()[number]

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of samples; their `video`s are padded to their bucket, or stay a list."""
        videos = [sample["video"] for sample in samples]
        others = [{name: value for name, value in sample.items() if name != "video"} for sample in samples]
        batch: dict[str, Any] = {"video": videos, **default_collate(others)}
        if self.buckets is not None:
            targets = [self._target((video.shape[1], video.shape[2], video.shape[3])) for video in videos]
            pairs = zip(videos, targets, strict=True)
            batch["video"] = torch.stack([pad_clip(video, target) for video, target in pairs if target is not None])
        return batch

    def report(self) -> str:
        """Return how many clips each size took, padded and dropped."""
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
        """Return the size that a clip is brought to; None drops it."""
        choices = [size] if self.buckets is None else self.buckets
        holding = (each for each in choices if all(own <= room for own, room in zip(size, each, strict=True)))
        target = next(holding, None)
        return None if target is None or self._tokens(target) > self.max_tokens else target

    def _tokens(self, size: Size) -> int:
        return math.prod(-(-side // token) for side, token in zip(size, self.token_size, strict=True))

    def _kept_tokens(self, index: int) -> int:
        target = self._targets[index]
        assert target is not None
        return self._tokens(target)

    def _kind(self, index: int) -> Size | int:
        """Clips of one kind can change places."""
        target = self._targets[index]
        return self._kept_tokens(index) if self.buckets is None or target is None else target

    def _batches(self) -> list[list[int]]:
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = self.epoch, self._draw()
        return self._drawn[1]

    def _draw(self) -> list[list[int]]:
        if not self.shuffle:
            return self._layout
        generator = keyed_numpy_generator(self.seed, self.epoch)
        of_kind: dict[Size | int, list[int]] = {}
        for index in generator.permutation(self._kept).tolist():
            of_kind.setdefault(self._kind(index), []).append(index)
        batches = [[of_kind[self._kind(index)].pop() for index in batch] for batch in self._layout]
        return [batches[place] for place in generator.permutation(len(batches))]

    def _lay_out(self) -> list[list[int]]:
        order = keyed_numpy_generator(self.seed).permutation(self._kept).tolist() if self.shuffle else self._kept
        # One open batch for each bucket; packed clips share one.
        opened: dict[Size | None, list[int]] = {}
        filled: Counter[Size | None] = Counter()
        batches = []
        for index in order:
            bucket = None if self.buckets is None else self._targets[index]
            tokens = self._kept_tokens(index)
            if filled[bucket] + tokens > self.max_tokens:
                batches.append(opened.pop(bucket))
                filled[bucket] = 0
            opened.setdefault(bucket, []).append(index)
            filled[bucket] += tokens
        return [*batches, *opened.values()]


def check_tokens(max_tokens: int, token_size: Sequence[int]) -> None:
    """Refuse batches without room for a token, and tokens without an extent.

    Raises:
        ValueError: If a number is below 1, or there are not three sides.
    """
    if max_tokens < 1 or len(token_size) != 3 or min(token_size) < 1:
        raise ValueError(f"max_tokens ({max_tokens}) and token_size {token_size} must be at least 1")


def pad_clip(
    clip: Shaped[Tensor, "channels frames height width"], size: Size
) -> Shaped[Tensor, "channels padded_frames padded_height padded_width"]:
    """Return the clip with its last frames, rows and columns repeated up to `size`."""
    for dim, side in enumerate(size, start=1):
        places = torch.arange(side, device=clip.device).clamp(max=clip.shape[dim] - 1)
        clip = clip.index_select(dim, places)
    return clip


def _size(size: Sequence[int]) -> Size:
    frames, height, width = size
    return frames, height, width


# Of a frame: containers round durations.
_TOLERANCE = 0.1


@dataclass(frozen=True)
class MixedSizes:
    """Settings of a run over clips of several sizes.

    A clip that is larger than `largest` is made smaller in its own proportions, never larger, and a longer one is
    cropped. Without buckets it is cropped to whole tokens, so that it can be packed.

    Attributes:
        largest: The size that clips are cropped and made smaller to.
        max_tokens: Tokens of a batch at most.
        token_size: Frames, rows and columns that make a token.
        buckets: Sizes that clips are padded to; None packs them.
        first_frame_alone: Whether packed clips have a frame more than whole tokens.

    Raises:
        ValueError: If a number is out of range, or no clip can be as large as a bucket.
    """

    largest: ClipShape
    max_tokens: int
    token_size: Size
    buckets: Sequence[Size] | None
    first_frame_alone: bool

    def __post_init__(self) -> None:
        check_tokens(self.max_tokens, self.token_size)
        largest = frames, height, width = self.largest.size
        if self.buckets is not None and not self.buckets:
            raise ValueError("buckets must be sizes (frames, height, width), or be left out to pack clips")
        for bucket in self.buckets or ():
            if len(bucket) != 3 or min(bucket) < 1 or any(map(operator.gt, bucket, largest)):
                raise ValueError(
                    f"bucket {tuple(bucket)} must be frames, height and width of at least 1 and at most frames "
                    f"({frames}), height ({height}) and width ({width}), which no clip exceeds"
                )

    def size_of(self, extent: ClipExtent) -> Size | None:
        """Return what a clip is brought to; None if it makes no token."""
        frames, height, width = self.largest.size
        frames = min(frames, math.floor(extent.seconds * self.largest.frame_rate + _TOLERANCE))
        scale = min(1.0, height / extent.height, width / extent.width)
        sides = [frames, round(extent.height * scale), round(extent.width * scale)]
        if self.buckets is None:
            parts = zip(sides, self.token_size, (int(self.first_frame_alone), 0, 0), strict=True)
            sides = [(side - alone) // token * token + alone for side, token, alone in parts]
        return (sides[0], sides[1], sides[2]) if min(sides) > 0 else None

    def batches(self, sizes: Sequence[Size], seed: int, shuffle: bool) -> TokenBuckets:
        """Return the batches of clips of these sizes.

        Raises:
            ValueError: If there is none.
        """
        return TokenBuckets(
            sizes,
            max_tokens=self.max_tokens,
            token_size=self.token_size,
            buckets=self.buckets,
            seed=seed,
            shuffle=shuffle,
        )
