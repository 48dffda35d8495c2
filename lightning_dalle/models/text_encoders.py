"""Text encoders: the protocol, a small trainable tower, and OpenCLIP's."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import open_clip
import torch
from jaxtyping import Bool, Float, Int
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from lightning_dalle.models.contrastive import OpenClipConfig, open_clip_tokenizer, read_model_config
from lightning_dalle.models.modes import draw_normal_weights, evaluation_mode
from lightning_dalle.models.sparse_transformer import SparseTransformerConfig, TransformerLayer
from lightning_dalle.ops.attention.patterns import AttentionPattern


@runtime_checkable
class TextEncoder(Protocol):
    """An encoder, frozen or trained: a tower of open_clip or transformers becomes one by a few lines around it."""

    @property
    def text_width(self) -> int:
        """Features of a token."""
        ...

    # The command line compares annotations with those of the class it is given: shapes are never equal, Any always is.
    def encode(self, captions: Any) -> Any:
        """Return the features of captions, a sequence of strings: floating point [captions, tokens, text_width].

        All captions have the same number of tokens at every call, with zeros behind a caption's end.
        """
        ...


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
        """Draw N(0, 0.02) weights; biases become 0."""
        draw_normal_weights(self)

    def forward(self, text_tokens: Int[Tensor, "batch text"]) -> Float[Tensor, "batch text width"]:
        """Return the features of each token, normalised."""
        hidden = self.embedding(text_tokens) + self.position_embedding.weight
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_norm(hidden)


class OpenClipTextEncoder(nn.Module):
    """A `TextEncoder`: features of every token, after the last norm, in place of the one that CLIP compares.

    A frozen tower runs in evaluation mode and without gradients, and is of no concern to the optimizer. Checkpoints of
    a module hold its weights, so `pretrained` has no use where one is loaded.

    Args:
        model_name: A name that open_clip knows (``ViT-B-32``), or ``local-dir:`` and a folder in open_clip's layout.
        pretrained: A tag that open_clip knows, or a local weights file; not for ``local-dir:``, which has its own.
            Without either the weights are random.
        trained: Whether the tower is trained along, or frozen.

    Raises:
        ValueError: If open_clip does not know the name, `pretrained` is given for a folder, or the tower is not
            open_clip's own.
    """

    def __init__(self, model_name: str, pretrained: str | None = None, trained: bool = False) -> None:
        super().__init__()
        config = OpenClipConfig(model_name=model_name, pretrained=pretrained)
        self.tokenizer = open_clip_tokenizer(model_name, read_model_config(config))
        # A network whose text tower is a module of its own; its image tower is dropped.
        tower = open_clip.create_model(model_name, pretrained, pretrained_text=False, force_custom_text=True).text
        if not isinstance(tower, TextTransformer):
            raise ValueError(
                f"model_name ({model_name}) has a text tower of another library ({type(tower).__name__}); choose one "
                "with open_clip's own, or write a TextEncoder around it"
            )
        # Of what is compared with images alone: it would get no gradient.
        tower.text_projection = None
        tower.output_tokens = True
        self.tower = tower.requires_grad_(trained)
        self.trained = trained

    @property
    def text_width(self) -> int:
        """Features of a token."""
        return self.tower.width

    def encode(self, captions: Sequence[str]) -> Float[Tensor, "captions text text_width"]:
        """Return the features of captions, zeros behind a caption's end; with gradients where the tower is trained."""
        tokens = self.tokenizer(list(captions)).to(self.tower.positional_embedding.device)
        with nullcontext() if self.trained else evaluation_mode(self.tower):
            _, features = self.tower(tokens)
        return features * self._valid(tokens).unsqueeze(-1)

    def _valid(self, tokens: Int[Tensor, "captions text"]) -> Bool[Tensor, "captions text"]:
        """Return tokens up to the end of text, found as open_clip finds it."""
        if self.tower.pool_type == "argmax":
            ends = tokens.argmax(dim=1, keepdim=True)
        elif self.tower.pool_type == "eos":
            ends = (tokens == self.tower.eos_id).int().argmax(dim=1, keepdim=True)
        else:
            return tokens != self.tower.pad_id
        return torch.arange(tokens.shape[1], device=tokens.device) <= ends
