"""Keys and values that one attention layer keeps while a sequence is decoded."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_dalle.ops.attention import attend
from lightning_dalle.ops.attention_pattern import AttentionPattern
from lightning_dalle.ops.block_attention import BlockMask, attend_block, share_of_second
from lightning_dalle.ops.candidate_groups import CandidateGroups
from lightning_dalle.ops.decoding_window import DecodingWindow


class _Kept(NamedTuple):
    text_keys: Tensor  # [captions, heads, text, head_dim]
    text_values: Tensor
    groups: CandidateGroups
    window: DecodingWindow


class KeyValueCache:
    """The cache of one layer: the first `attend` takes the whole prefix, each later one a single position.

    Of the text it keeps one copy for all candidates of a caption, of the image what the pattern still reaches. All of
    it is allocated with the prefix.

    Args:
        pattern: Pattern of the whole sequence. A prefix must be the text block and complete rows of the grid.

    Raises:
        ValueError: If the pattern is not causal.
    """

    def __init__(self, pattern: AttentionPattern) -> None:
        if pattern.kind == "full":
            raise ValueError(
                "kind ('full') attends to the future and cannot be decoded step by step; use a causal pattern"
            )
        self._pattern = pattern
        self._kept: _Kept | None = None
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the kept keys and values."""
        if self._kept is None:
            return 0
        window = self._kept.window
        return sum(kept.nbytes for kept in (self._kept.text_keys, self._kept.text_values, window.keys, window.values))

    def attend(
        self,
        query: Float[Tensor, "batch heads new head_dim"],
        key: Float[Tensor, "batch heads new head_dim"],
        value: Float[Tensor, "batch heads new head_dim"],
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Appends the new positions, and attends from them to all that the pattern lets them see.

        Raises:
            ValueError: If the prefix is not the text and complete rows, more than one position follows it, or the
                sequence is already complete.
        """
        if self._kept is None:
            return self._attend_prefix(query, key, value)
        if query.shape[-2] != 1:
            raise ValueError(
                f"query has {query.shape[-2]} positions; after its prefix a sequence is decoded one by one"
            )
        if self.length == self._pattern.length:
            raise ValueError(f"the cache is full: its pattern has {self._pattern.length} positions")
        text_keys, text_values, groups, window = self._kept
        index = self.length - self._pattern.text_length
        window.write(index, key, value)
        self.length += 1
        keys, values, mask = window.read(index)
        image, image_log_sum_exp = attend_block(query, keys, values, mask=BlockMask(mask))
        text, text_log_sum_exp = map(
            groups.unfold, attend_block(groups.fold(query), text_keys, text_values, mask=BlockMask())
        )
        return text.lerp(image, share_of_second(text_log_sum_exp, image_log_sum_exp).to(image.dtype))

    def select(self, rows: Int[Tensor, " selected"]) -> "KeyValueCache":
        """A new cache whose batch is `rows` of this one: how candidates of one caption share its prefix."""
        selected = KeyValueCache(self._pattern)
        if self._kept is not None:
            text_keys, text_values, groups, window = self._kept
            captions, numbers = groups.captions[rows].unique(return_inverse=True)
            if len(captions) < len(text_keys):
                text_keys, text_values = text_keys[captions], text_values[captions]
            selected._kept = _Kept(text_keys, text_values, CandidateGroups(numbers), window.select(rows))
            selected.length = self.length
        return selected

    def _attend_prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        text_length = self._pattern.text_length
        rows, rest = divmod(query.shape[-2] - text_length, self._pattern.width)
        if rest or rows < 0:
            raise ValueError(
                f"a prefix of {query.shape[-2]} positions must be the text block ({text_length}) "
                f"and complete rows of {self._pattern.width}"
            )
        window = DecodingWindow(self._pattern, key)
        window.fill(key[:, :, text_length:], value[:, :, text_length:])
        text_keys, text_values = (tensor[:, :, :text_length].contiguous() for tensor in (key, value))
        groups = CandidateGroups(torch.arange(len(key), device=key.device))
        self._kept = _Kept(text_keys, text_values, groups, window)
        self.length = key.shape[-2]
        return attend(query, key, value, self._pattern.with_height(rows))
