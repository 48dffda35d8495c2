"""The text-to-image transformer of Zero-Shot Text-to-Image Generation (Ramesh et al. 2021, section 2.2)."""

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from lightning_dalle.models.modes import draw_normal_weights
from lightning_dalle.ops.attention.api import attend_projected
from lightning_dalle.ops.attention.kv_cache import KeyValueCache
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from lightning_dalle.ops.sharded_sequence import current_shard, local_positions


@dataclass(frozen=True, kw_only=True)
class SparseTransformerConfig:
    """Sizes of a `SparseTransformer`; the defaults are the paper's, 12e9 parameters.

    Args:
        text_tokens: Positions of a caption, padding included.
        text_vocabulary_size: Ids of captions are below it; id 0 is padding.
        grid_height: Rows of image tokens.
        convolution_kernel_size: Side of the last layer's causal window, odd.
        attention_dropout: Probability that an attention weight is dropped in training; the paper has none.
        activation_checkpointing: Recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        ValueError: If a size is below 1, the kernel size is even, or the dropout is no probability below 1.
    """

    depth: int = 64
    num_heads: int = 62
    head_dim: int = 64
    text_tokens: int = 256
    text_vocabulary_size: int = 16384
    grid_height: int = 32
    grid_width: int = 32
    image_vocabulary_size: int = 8192
    convolution_kernel_size: int = 11
    attention_dropout: float = 0.0
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} ({getattr(self, field.name)}) must be at least 1")
        if self.convolution_kernel_size % 2 == 0:
            raise ValueError(f"convolution_kernel_size ({self.convolution_kernel_size}) must be odd")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout ({self.attention_dropout}) must be in [0, 1)")

    @property
    def width(self) -> int:
        """Features of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def image_tokens(self) -> int:
        """Tokens of one image."""
        return self.grid_height * self.grid_width

    def pattern(self, layer: int) -> AttentionPattern:
        """Attention of the 0-based `layer`: row, column, row, row, repeated; the last is convolutional."""
        kind: PatternKind = "column" if layer % 4 == 1 else "row"
        if layer == self.depth - 1:
            kind = "convolution"
        # Start of text and start of image stand at both ends of the text block.
        text_length = self.text_tokens + 2
        return AttentionPattern(kind, text_length, self.grid_height, self.grid_width, self.convolution_kernel_size)


class SelfAttention(nn.Module):
    """Multi-head attention under one pattern, with one fused projection."""

    def __init__(self, config: SparseTransformerConfig, pattern: AttentionPattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(
        self, hidden: Float[Tensor, "batch length width"], cache: KeyValueCache | None = None
    ) -> Float[Tensor, "batch length width"]:
        """Attend within the sequence; with a cache, from the positions that `hidden` adds to it."""
        projected = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, self.head_dim))
        if cache is not None:
            query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, head_dim]
            attended = cache.attend(query, key, value)
        elif self.training and self.dropout > 0:
            # Drawn from the global generator, which activation checkpointing rewinds.
            seed = int(torch.randint(2**63 - 1, ()))
            attended = attend_projected(projected, self.pattern, dropout=self.dropout, dropout_seed=seed)
        else:
            attended = attend_projected(projected, self.pattern)
        return self.output(attended.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Two pre-normalised residual blocks: attention, then a GELU network four times as wide."""

    def __init__(self, config: SparseTransformerConfig, pattern: AttentionPattern) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config, pattern)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def block_outputs(self) -> tuple[nn.Linear, nn.Linear]:
        """Return the projections that end the two residual blocks."""
        return self.attention.output, self.fc2

    def forward(
        self, hidden: Float[Tensor, "batch length width"], cache: KeyValueCache | None = None
    ) -> Float[Tensor, "batch length width"]:
        """Both blocks, the cache as for `SelfAttention`."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cache)
        return hidden + self.fc2(gelu(self.fc1(self.feed_forward_norm(hidden))))


class SparseTransformer(nn.Module):
    """Decoder-only transformer over `[start of text, caption, start of image, image in raster order]`.

    Each position predicts the next one, text and image by heads of their own. Padding (text id 0) is never masked: each
    of the caption's positions has its own learned padding token. A caption of padding alone stands for "no caption".

    Example:
        >>> config = SparseTransformerConfig(depth=2, num_heads=2, head_dim=8, text_tokens=6, text_vocabulary_size=20,
        ...                                  grid_height=4, grid_width=4, image_vocabulary_size=16)
        >>> network = SparseTransformer(config)
        >>> text, image = torch.ones(3, 6, dtype=torch.long), torch.zeros(3, 16, dtype=torch.long)
        >>> [logits.shape for logits in network(text, image)]
        [torch.Size([3, 6, 20]), torch.Size([3, 16, 16])]
    """

    def __init__(self, config: SparseTransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.text_embedding = nn.Embedding(config.text_vocabulary_size, width)
        self.padding_embedding = nn.Embedding(config.text_tokens, width)
        self.text_position_embedding = nn.Embedding(config.text_tokens, width)
        self.marker_embedding = nn.Embedding(2, width)  # start of text, start of image
        self.image_embedding = nn.Embedding(config.image_vocabulary_size, width)
        self.row_embedding = nn.Embedding(config.grid_height, width)
        self.column_embedding = nn.Embedding(config.grid_width, width)
        self.layers = nn.ModuleList(TransformerLayer(config, config.pattern(layer)) for layer in range(config.depth))
        self.final_norm = nn.LayerNorm(width)
        self.text_head = nn.Linear(width, config.text_vocabulary_size)
        self.image_head = nn.Linear(width, config.image_vocabulary_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw N(0, 0.02) weights; those that end a residual block are divided by sqrt(2 * depth). Biases become 0."""
        draw_normal_weights(self)
        for module in self.modules():
            if isinstance(module, TransformerLayer):
                for projection in module.block_outputs():
                    projection.weight.div_(math.sqrt(2 * self.config.depth))

    def gradient_blocks(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the residual blocks, two of each layer, as the modules from where one leaves the identity path."""
        blocks: dict[str, tuple[nn.Module, ...]] = {}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerLayer)
            blocks[f"layer_{number}.attention"] = (layer.attention_norm, layer.attention)
            blocks[f"layer_{number}.feed_forward"] = (layer.feed_forward_norm, layer.fc1, layer.fc2)
        return blocks

    def forward(
        self, text_tokens: Int[Tensor, "batch text"], image_tokens: Int[Tensor, "batch image"]
    ) -> tuple[Float[Tensor, "batch text text_vocabulary"], Float[Tensor, "batch image image_vocabulary"]]:
        """Logits of every text token and every image token, each given all tokens before it.

        Within `sharded_sequences`, of the `own_tokens` alone, if the hidden states were sharded before the first layer.

        Raises:
            ValueError: If a caption or an image has another number of tokens than the configuration says.
        """
        self._check_shape("text_tokens", text_tokens, self.config.text_tokens)
        self._check_shape("image_tokens", image_tokens, self.config.image_tokens)
        hidden = torch.cat([self._embed_text(text_tokens), self._embed_image(image_tokens, 0)], dim=1)
        for layer in self.layers:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        text_hidden, image_hidden = self._predicting(hidden)
        return self.text_head(self.final_norm(text_hidden)), self.image_head(self.final_norm(image_hidden))

    def own_tokens(
        self, text_tokens: Int[Tensor, "batch text"], image_tokens: Int[Tensor, "batch image"]
    ) -> tuple[Int[Tensor, "batch own_text"], Int[Tensor, "batch own_image"]]:
        """Return the tokens that `forward` gives logits of: all of them where sequences are whole."""
        if current_shard() is None:
            return text_tokens, image_tokens
        positions = local_positions(self.config.pattern(0).length, text_tokens.device)
        of_text, of_image = self._kinds(positions)
        return text_tokens[:, positions[of_text]], image_tokens[:, positions[of_image] - self.config.text_tokens - 1]

    def _predicting(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States of the positions that predict a text token, and of those that predict an image token."""
        if current_shard() is None:
            # Views, where nothing has to be picked.
            return hidden[:, : self.config.text_tokens], hidden[:, self.config.text_tokens + 1 : -1]
        of_text, of_image = self._kinds(local_positions(self.config.pattern(0).length, hidden.device))
        return hidden[:, of_text], hidden[:, of_image]

    def _kinds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the token after each position is one of the text, and whether it is one of the image."""
        before_image, last = self.config.text_tokens, self.config.pattern(0).length - 1
        return positions < before_image, (positions > before_image) & (positions < last)

    def start_decoding(
        self, text_tokens: Int[Tensor, "batch text"], prime_tokens: Int[Tensor, "batch primed"] | None = None
    ) -> tuple[Float[Tensor, "batch image_vocabulary"], list[KeyValueCache]]:
        """Run the prefix; gives the logits of the next image token and the layers' caches.

        Args:
            prime_tokens: Tokens of the image's first rows, complete ones.

        Raises:
            ValueError: If the text has a wrong length or the prime is not made of complete rows, fewer than all.
        """
        self._check_shape("text_tokens", text_tokens, self.config.text_tokens)
        hidden = self._embed_text(text_tokens)
        if prime_tokens is not None:
            rows, rest = divmod(prime_tokens.shape[1], self.config.grid_width)
            if rest or rows >= self.config.grid_height:
                raise ValueError(
                    f"prime_tokens has {prime_tokens.shape[1]} tokens; it must be complete rows of "
                    f"{self.config.grid_width}, at most {self.config.grid_height - 1} of them"
                )
            hidden = torch.cat([hidden, self._embed_image(prime_tokens, 0)], dim=1)
        caches = [KeyValueCache(self.config.pattern(layer)) for layer in range(self.config.depth)]
        return self._last_logits(hidden, caches), caches

    def decode_step(
        self, image_tokens: Int[Tensor, " batch"], caches: list[KeyValueCache]
    ) -> Float[Tensor, "batch image_vocabulary"]:
        """Append one image token to each sequence, in place in `caches`; gives the logits of the one after it."""
        index = caches[0].length - (self.config.text_tokens + 2)
        return self._last_logits(self._embed_image(image_tokens.unsqueeze(1), index), caches)

    def _last_logits(self, hidden: Tensor, caches: list[KeyValueCache]) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, cache)
        return self.image_head(self.final_norm(hidden[:, -1]))

    def _embed_text(self, text_tokens: Tensor) -> Tensor:
        is_padding = (text_tokens == 0).unsqueeze(-1)
        tokens = torch.where(is_padding, self.padding_embedding.weight, self.text_embedding(text_tokens))
        tokens = tokens + self.text_position_embedding.weight
        markers = self.marker_embedding.weight.expand(len(text_tokens), 2, -1)
        return torch.cat([markers[:, :1], tokens, markers[:, 1:]], dim=1)

    def _embed_image(self, image_tokens: Tensor, start: int) -> Tensor:
        """Embeds tokens that follow each other in raster order from index `start`."""
        index = torch.arange(start, start + image_tokens.shape[1], device=image_tokens.device)
        rows = self.row_embedding(index // self.config.grid_width)
        columns = self.column_embedding(index % self.config.grid_width)
        return self.image_embedding(image_tokens) + rows + columns

    def _check_shape(self, name: str, tokens: Tensor, expected: int) -> None:
        if tokens.shape[1] != expected:
            raise ValueError(
                f"{name} has shape {tuple(tokens.shape)}; the network is configured for [batch, {expected}]"
            )
