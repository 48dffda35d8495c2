"""The image keys and values that a pattern can still reach while a sequence is decoded."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_dalle.ops.attention_pattern import AttentionPattern


class DecodingWindow:
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
        """Keeps the first image positions, as far as there are slots."""
        length = keys.shape[-2]
        first = max(0, length - self._num_slots)
        slots = torch.tensor([self._slot(index) for index in range(first, length)], dtype=torch.long).to(keys.device)
        self.keys.index_copy_(2, slots, keys[:, :, first:])
        self.values.index_copy_(2, slots, values[:, :, first:])

    def write(
        self, index: int, key: Float[Tensor, "batch heads 1 head_dim"], value: Float[Tensor, "batch heads 1 head_dim"]
    ) -> None:
        """Keeps the image position `index`, counted in raster order; all before it must be there."""
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
        """Views of keys and values for the position `index`, which must be written; the mask hides what is not seen."""
        if self._pattern.kind == "column":
            slot = self._slot(index)
            reached = slice(slot - index // self._pattern.width, slot + 1)
        else:
            reached = slice(0, min(index + 1, self._num_slots))
        mask = None
        if self._mask is not None:
            mask = self._mask[..., -index % self._num_slots :][..., reached]
        return self.keys[:, :, reached], self.values[:, :, reached], mask

    def select(self, rows: Int[Tensor, " selected"]) -> "DecodingWindow":
        """A window whose batch is `rows` of this one, with slots of its own."""
        selected = DecodingWindow(self._pattern, self.keys[:0])
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
