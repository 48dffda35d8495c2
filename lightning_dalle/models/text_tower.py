"""A small encoder of captions, trained together with what they condition."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_dalle.models.initialisation import draw_normal_weights
from lightning_dalle.models.sparse_transformer import SparseTransformerConfig, TransformerLayer
from lightning_dalle.ops.attention_pattern import AttentionPattern


@dataclass(frozen=True, kw_only=True)
class TextTowerConfig:
    """Sizes of a `TextTower`.

    Args:
        text_tokens: Positions of a caption, padding included.
        vocabulary_size: Ids of captions are below it; id 0 is padding.

    Raises:
        ValueError: If a size is below 1.
    """

    depth: int = 2
    num_heads: int = 2
    head_dim: int = 64
    text_tokens: int = 16
    vocabulary_size: int = 512

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.num_heads * self.head_dim


class TextTower(nn.Module):
    """Layers of the text-to-image transformer, each token attending to all; padding is a learned token like any other.

    Example:
        >>> import torch
        >>> TextTower(TextTowerConfig(text_tokens=5))(torch.ones(3, 5, dtype=torch.long)).shape
        torch.Size([3, 5, 128])
    """

    def __init__(self, config: TextTowerConfig) -> None:
        super().__init__()
        self.config = config
        sizes = SparseTransformerConfig(depth=config.depth, num_heads=config.num_heads, head_dim=config.head_dim)
        pattern = AttentionPattern("full", config.text_tokens, height=0, width=1)
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.position_embedding = nn.Embedding(config.text_tokens, config.width)
        self.layers = nn.ModuleList(TransformerLayer(sizes, pattern) for _ in range(config.depth))
        self.final_norm = nn.LayerNorm(config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws N(0, 0.02) weights; biases become 0."""
        draw_normal_weights(self)

    def forward(self, text_tokens: Int[Tensor, "batch text"]) -> Float[Tensor, "batch text width"]:
        """Features of each token, normalised."""
        hidden = self.embedding(text_tokens) + self.position_embedding.weight
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_norm(hidden)
