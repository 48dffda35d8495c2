"""What the structured paths are measured against: the same networks with dense attention and dense caches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.attention.patterns import AttentionPattern


def dense_causal_twin(network: SparseTransformer) -> SparseTransformer:
    """A network of the same sizes and weights in which every layer attends to all that comes before."""
    twin = SparseTransformer(network.config)
    twin.load_state_dict(network.state_dict())
    for index, layer in enumerate(twin.layers):
        layer.attention.pattern = replace(network.config.pattern(index), kind="causal")
    return twin


class DenseKeyValueCache:
    """Every key and value of every sequence, preallocated; a step reads all so far under a row of the whole mask."""

    def __init__(self, pattern: AttentionPattern, mask: Tensor) -> None:
        self.pattern, self.mask = pattern, mask
        self.keys = self.values = torch.empty(0)
        self.length = 0

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.length == 0:
            shape = (*key.shape[:2], self.pattern.length, key.shape[-1])
            self.keys, self.values = key.new_empty(shape), value.new_empty(shape)
        start, self.length = self.length, self.length + key.shape[-2]
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        mask = self.mask[start : self.length, : self.length]
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def select(self, rows: Tensor) -> "DenseKeyValueCache":
        selected = DenseKeyValueCache(self.pattern, self.mask)
        selected.keys, selected.values = self.keys[rows], self.values[rows]
        selected.length = self.length
        return selected


class DenselyCachedTransformer(SparseTransformer):
    """The same network and patterns, decoded with dense caches."""

    def __init__(self, config: SparseTransformerConfig) -> None:
        super().__init__(config)
        self._masks: dict[AttentionPattern, Tensor] = {}
        for layer in range(config.depth):
            pattern = config.pattern(layer)
            mask = torch.zeros(pattern.length, pattern.length).masked_fill_(~pattern.mask(), float("-inf"))
            self._masks[pattern] = mask

    def start_decoding(self, text_tokens: Tensor, prime_tokens: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        assert prime_tokens is None
        patterns = [self.config.pattern(layer) for layer in range(self.config.depth)]
        caches: list[Any] = [DenseKeyValueCache(pattern, self._masks[pattern]) for pattern in patterns]
        return self._last_logits(self._embed_text(text_tokens), caches), caches
