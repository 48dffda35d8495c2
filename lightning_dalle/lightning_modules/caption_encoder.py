"""The default text encoder of the video module: a tokenizer and a small tower."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.models.text_encoders import TextTower, TextTowerConfig


class CaptionEncoder(nn.Module):
    """Captions through a `CaptionTokenizer` and a `TextTower`.

    Raises:
        ValueError: If the tower has no room for the tokenizer's words.
    """

    def __init__(self, config: TextTowerConfig, tokenizer: CaptionTokenizer) -> None:
        super().__init__()
        if tokenizer.vocabulary_size > config.vocabulary_size:
            raise ValueError(
                f"vocabulary_size ({config.vocabulary_size}) must be at least the tokenizer's "
                f"({tokenizer.vocabulary_size}); raise it or train a smaller tokenizer"
            )
        self.tokenizer = tokenizer
        self.tower = TextTower(config)

    @property
    def text_width(self) -> int:
        """Features of a token."""
        return self.tower.config.width

    def encode(self, captions: Sequence[str]) -> Float[Tensor, "captions text text_width"]:
        """Features of captions, with gradients."""
        tokens = self.tokenizer.encode(captions, self.tower.config.text_tokens)
        return self.tower(tokens.to(self.tower.embedding.weight.device))
