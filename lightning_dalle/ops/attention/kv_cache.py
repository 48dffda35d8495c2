"""Keys and values kept while tokens are decoded."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.kernels import BlockMask, attend_block, merge_weight
from lightning_dalle.ops.attention.patterns import AttentionPattern


class SharedPrefixGroups:
    """Sequences folded by caption: to its text, the candidates' queries are those of one sequence.

    Args:
        captions: The caption of each sequence, in any order; every number from 0 to the largest occurs.
    """

    def __init__(self, captions: Int[Tensor, " sequences"]) -> None:
        self.captions = captions
        counts = captions.bincount()
        order = captions.argsort(stable=True)
        rank = torch.arange(len(captions), device=captions.device) - (counts.cumsum(0) - counts)[captions[order]]
        self._num_captions, self._most = len(counts), int(counts.max())
        self._slots = captions * self._most + torch.empty_like(rank).index_copy_(0, order, rank)

    def fold(
        self, query: Float[Tensor, "sequences heads 1 head_dim"]
    ) -> Float[Tensor, "captions heads candidates head_dim"]:
        """Return the queries by caption, zeros where one has fewer candidates than another."""
        _, heads, _, head_dim = query.shape
        slots = query.new_zeros(self._num_captions * self._most, heads, head_dim)
        slots.index_copy_(0, self._slots, query.squeeze(2))
        return slots.unflatten(0, (self._num_captions, self._most)).transpose(1, 2)

    def unfold(
        self, folded: Float[Tensor, "captions heads candidates *rest"]
    ) -> Float[Tensor, "sequences heads 1 *rest"]:
        """Return what belongs to each sequence, in the order of the batch."""
        return folded.transpose(1, 2).flatten(0, 1).index_select(0, self._slots).unsqueeze(2)


class RollingCache:
    """Preallocated slots that are overwritten once no later position reaches what they hold.

    Row and convolution write around a ring as long as the pattern's reach. Column keeps the whole grid, since every
    column is reached until the last row, but column by column, so that a step reads one stretch of it.

    Args:
        like: Keys of any length, which say batch, heads, head_dim, dtype and device.
    """

    def __init__(self, pattern: AttentionPattern, like: Float[Tensor, "batch heads length head_dim"]) -> None:
        batch, heads, _, head_dim = like.shape
        self._pattern = pattern
        self._num_slots = min(pattern.reach + 1, pattern.image_length)
        self.keys = like.new_empty(batch, heads, self._num_slots, head_dim)
        self.values = torch.empty_like(self.keys)
        self._mask = _ring_mask(pattern, self.keys) if pattern.kind == "convolution" else None

    def fill(
        self, keys: Float[Tensor, "batch heads prefix head_dim"], values: Float[Tensor, "batch heads prefix head_dim"]
    ) -> None:
        """Keep the first image positions, as far as there are slots."""
        length = keys.shape[-2]
        first = max(0, length - self._num_slots)
        slots = torch.tensor([self._slot(index) for index in range(first, length)], dtype=torch.long).to(keys.device)
        self.keys.index_copy_(2, slots, keys[:, :, first:])
        self.values.index_copy_(2, slots, values[:, :, first:])

    def write(
        self, index: int, key: Float[Tensor, "batch heads 1 head_dim"], value: Float[Tensor, "batch heads 1 head_dim"]
    ) -> None:
        """Keep the image position `index`, counted in raster order; all before it must be there."""
        slot = self._slot(index)
        self.keys[:, :, slot : slot + 1] = key
        self.values[:, :, slot : slot + 1] = value

    def read(
        self, index: int
    ) -> tuple[
        Float[Tensor, "batch heads reached head_dim"],
        Float[Tensor, "batch heads reached head_dim"],
        Float[Tensor, "1 1 1 reached"] | None,
    ]:
        """Views of keys and values for the position `index`, which must be written; the mask says what is not seen."""
        if self._pattern.kind == "column":
            slot = self._slot(index)
            reached = slice(slot - index // self._pattern.width, slot + 1)
        else:
            reached = slice(0, min(index + 1, self._num_slots))
        mask = None
        if self._mask is not None:
            mask = self._mask[..., -index % self._num_slots :][..., reached]
        return self.keys[:, :, reached], self.values[:, :, reached], mask

    def select(self, rows: Int[Tensor, " selected"]) -> "RollingCache":
        """Return a window whose batch is `rows` of this one, with slots of its own."""
        selected = RollingCache(self._pattern, self.keys[:0])
        selected.keys, selected.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        return selected

    def _slot(self, index: int) -> int:
        if self._pattern.kind == "column":
            row, column = divmod(index, self._pattern.width)
            return column * self._pattern.height + row
        return index % self._num_slots


def _ring_mask(pattern: AttentionPattern, like: Tensor) -> Float[Tensor, "1 1 1 slots"]:
    """Twice around the ring: from element -index on, slot by slot, what the position `index` sees."""
    num_slots = like.shape[-2]
    offsets = -torch.arange(2 * num_slots, device=like.device) % num_slots
    query = torch.tensor(pattern.text_length + num_slots, device=like.device)
    hidden = ~pattern.attends(query, query - offsets)
    return like.new_zeros(1, 1, 1, 2 * num_slots).masked_fill_(hidden, float("-inf"))


class _Kept(NamedTuple):
    text_keys: Tensor  # [captions, heads, text, head_dim]
    text_values: Tensor
    groups: SharedPrefixGroups
    window: RollingCache


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
        """Append the new positions, and attends from them to all that the pattern lets them see.

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
        return text.lerp(image, merge_weight(text_log_sum_exp, image_log_sum_exp).to(image.dtype))

    def select(self, rows: Int[Tensor, " selected"]) -> "KeyValueCache":
        """Return a new cache whose batch is `rows` of this one: how candidates of one caption share its prefix."""
        selected = KeyValueCache(self._pattern)
        if self._kept is not None:
            text_keys, text_values, groups, window = self._kept
            captions, numbers = groups.captions[rows].unique(return_inverse=True)
            if len(captions) < len(text_keys):
                text_keys, text_values = text_keys[captions], text_values[captions]
            selected._kept = _Kept(text_keys, text_values, SharedPrefixGroups(numbers), window.select(rows))
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
        window = RollingCache(self._pattern, key)
        window.fill(key[:, :, text_length:], value[:, :, text_length:])
        text_keys, text_values = (tensor[:, :, :text_length].contiguous() for tensor in (key, value))
        groups = SharedPrefixGroups(torch.arange(len(key), device=key.device))
        self._kept = _Kept(text_keys, text_values, groups, window)
        self.length = key.shape[-2]
        return attend(query, key, value, self._pattern.with_height(rows))
