"""The text tower of an open_clip model as the encoder of a diffusion model's captions."""

from collections.abc import Sequence
from contextlib import nullcontext

import open_clip
import torch
from jaxtyping import Bool, Float, Int
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from lightning_dalle.models.contrastive import OpenClipConfig, open_clip_tokenizer, read_model_config
from lightning_dalle.models.evaluation_mode import evaluation_mode


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
        """Features of captions, zeros behind a caption's end; with gradients where the tower is trained."""
        tokens = self.tokenizer(list(captions)).to(self.tower.positional_embedding.device)
        with nullcontext() if self.trained else evaluation_mode(self.tower):
            _, features = self.tower(tokens)
        return features * self._valid(tokens).unsqueeze(-1)

    def _valid(self, tokens: Int[Tensor, "captions text"]) -> Bool[Tensor, "captions text"]:
        """Tokens up to the end of text, found as open_clip finds it."""
        if self.tower.pool_type == "argmax":
            ends = tokens.argmax(dim=1, keepdim=True)
        elif self.tower.pool_type == "eos":
            ends = (tokens == self.tower.eos_id).int().argmax(dim=1, keepdim=True)
        else:
            return tokens != self.tower.pad_id
        return torch.arange(tokens.shape[1], device=tokens.device) <= ends
