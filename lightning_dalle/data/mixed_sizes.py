"""Which size each clip of a mixed set is brought to, and how many make a batch."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dalle.data.clip_decoding import ClipExtent, ClipShape
from lightning_dalle.data.token_buckets import Size, TokenBuckets, check_tokens

# Of a frame: containers round durations.
_TOLERANCE = 0.1


@dataclass(frozen=True)
class MixedSizes:
    """Settings of a run over clips of several sizes.

    A clip that is larger than `largest` is made smaller in its own proportions, never larger, and a longer one is cut.
    Without buckets it is cut to whole tokens, so that it can be packed.

    Attributes:
        largest: What clips are cut and made smaller to.
        max_tokens: Of a batch.
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
        """What a clip is brought to; None if it makes no token."""
        frames, height, width = self.largest.size
        frames = min(frames, math.floor(extent.seconds * self.largest.frame_rate + _TOLERANCE))
        scale = min(1.0, height / extent.height, width / extent.width)
        sides = [frames, round(extent.height * scale), round(extent.width * scale)]
        if self.buckets is None:
            parts = zip(sides, self.token_size, (int(self.first_frame_alone), 0, 0), strict=True)
            sides = [(side - alone) // token * token + alone for side, token, alone in parts]
        return (sides[0], sides[1], sides[2]) if min(sides) > 0 else None

    def batches(self, sizes: Sequence[Size], seed: int, shuffle: bool) -> TokenBuckets:
        """The batches of clips of these sizes.

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
