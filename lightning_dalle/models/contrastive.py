"""The contrastive loss over the batches of all ranks, without the false negatives of repeated captions."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import open_clip
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig:
    """Sizes of a small CLIP (Radford et al. 2021): a ModifiedResNet and a causal text transformer.

    The defaults are the smallest that learn to rank captioned pictures on two processor cores; vision transformers of
    this size hardly do.

    Args:
        image_size: Side in pixels, a multiple of 32; larger and smaller images are resized to it.
        vision_layers: Bottleneck blocks of the four stages.
        text_tokens: Positions of a caption, the end-of-text token included.

    Raises:
        ValueError: If a size is below 1, or does not divide as the network needs.
    """

    image_size: int = 64
    embed_dim: int = 128
    vision_layers: tuple[int, int, int, int] = (1, 1, 1, 1)
    vision_width: int = 16
    text_tokens: int = 32
    text_width: int = 128
    text_heads: int = 4
    text_layers: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "vision_layers", tuple(self.vision_layers))
        for item in fields(self):
            sizes = getattr(self, item.name)
            if min(sizes if isinstance(sizes, tuple) else (sizes,)) < 1:
                raise ValueError(f"{item.name} ({sizes}) must be at least 1")
        if self.image_size % 32:
            raise ValueError(f"image_size ({self.image_size}) must be a multiple of 32, the stride of the image tower")
        if self.text_width % self.text_heads:
            raise ValueError(f"text_width ({self.text_width}) must be divisible by text_heads ({self.text_heads})")

    def model_config(self, vocabulary_size: int) -> dict[str, Any]:
        """Return the open_clip configuration for a tokenizer of `vocabulary_size` ids and the end-of-text id."""
        vision = {"layers": list(self.vision_layers), "width": self.vision_width, "image_size": self.image_size}
        text = {
            "context_length": self.text_tokens,
            "vocab_size": vocabulary_size + 1,
            "width": self.text_width,
            "heads": self.text_heads,
            "layers": self.text_layers,
        }
        return {"embed_dim": self.embed_dim, "vision_cfg": vision, "text_cfg": text}


@dataclass(frozen=True, kw_only=True)
class OpenClipConfig:
    """Any open_clip model.

    Args:
        model_name: A name that open_clip knows (``ViT-B-32``), or ``local-dir:`` and a folder in open_clip's layout.
        pretrained: A tag that open_clip knows, or a local weights file; not for ``local-dir:``, which has its own.
        model_config: open_clip's configuration, read from `model_name` where it is empty. Checkpoints carry it, so
            that they load where neither the folder nor the weights file exists.

    Raises:
        ValueError: If `pretrained` is given for a folder.
    """

    model_name: str
    pretrained: str | None = None
    model_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pretrained is not None and self.model_name.startswith("local-dir:"):
            raise ValueError(
                f"pretrained ({self.pretrained}) has no effect with model_name ({self.model_name}), "
                "whose folder holds the weights; drop pretrained"
            )


def read_model_config(config: OpenClipConfig) -> dict[str, Any]:
    """Read open_clip's configuration of `config.model_name`.

    Raises:
        ValueError: If open_clip does not know the name.
    """
    model_config = config.model_config or open_clip.get_model_config(config.model_name)
    if model_config is None:
        raise ValueError(
            f"model_name ({config.model_name}) is unknown to open_clip; "
            "choose one of open_clip.list_models() or local-dir:FOLDER"
        )
    return dict(model_config)


def build_open_clip(config: OpenClipConfig) -> nn.Module:
    """Build a network by name, with the weights that `config` names; without weights if it carries a `model_config`."""
    if config.model_config:
        return _build_without_weights(config.model_config)
    # open_clip would take the CPU, also under `with torch.device("meta")`.
    device = torch.get_default_device()
    return open_clip.create_model(config.model_name, pretrained=config.pretrained, pretrained_text=False, device=device)


def _build_without_weights(model_config: Mapping[str, Any]) -> nn.Module:
    """Return what `open_clip.create_model` builds, which takes names and folders only and never a configuration."""
    arguments = copy.deepcopy(dict(model_config))
    vision, text = arguments["vision_cfg"], arguments["text_cfg"]
    custom_text = arguments.pop("custom_text", False) or "hf_model_name" in text
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    if "hf_model_name" in text:
        text["hf_model_pretrained"] = False
    if not custom_text:
        return open_clip.CLIP(**arguments)
    return (open_clip.CoCa if "multimodal_cfg" in arguments else open_clip.CustomTextCLIP)(**arguments)


def open_clip_tokenizer(model_name: str, model_config: Mapping[str, Any]) -> Callable[[list[str]], Tensor]:
    """Return the tokenizer that goes with a network by name; its ids end with the end of text, padding is behind."""
    text = model_config["text_cfg"]
    if model_name.startswith("local-dir:") and "hf_tokenizer_name" not in text:
        # Without a name open_clip takes its own tokenizer and reads no folder, which may be gone.
        return open_clip.get_tokenizer(
            "", context_length=text.get("context_length"), **text.get("tokenizer_kwargs", {})
        )
    return open_clip.get_tokenizer(model_name)


def pixel_statistics(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel that the network's weights expect, each [3, 1, 1]."""
    mean = getattr(network.visual, "image_mean", open_clip.OPENAI_DATASET_MEAN)
    std = getattr(network.visual, "image_std", open_clip.OPENAI_DATASET_STD)
    return torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)


def append_end_of_text(tokens: Int[Tensor, "batch text"], end_of_text: int) -> Int[Tensor, "batch text+1"]:
    """Add one position and put `end_of_text` behind the last token that is not padding (id 0).

    open_clip pools the text at the position of the highest id, so `end_of_text` must be above all others.

    Example:
        >>> append_end_of_text(torch.tensor([[5, 3, 0], [5, 3, 4]]), end_of_text=9)
        tensor([[5, 3, 9, 0],
                [5, 3, 4, 9]])
    """
    ends = (tokens != 0).sum(dim=1, keepdim=True)
    return pad(tokens, (0, 1)).scatter(1, ends, end_of_text)


class RepeatedCaptionClipLoss(open_clip.ClipLoss):
    """open_clip's `ClipLoss`, in which an image and another image's equal caption are no negatives of each other.

    In sets with few distinct captions a batch repeats them; each repeat would be pushed away as a negative although it
    describes the image. Such pairs are left out of both softmaxes; without repeats the loss is `ClipLoss` exactly.

    Features are gathered over the default process group with their gradient, each rank computes its own rows, and so
    the mean over ranks (what DDP takes) of value and gradient is that of one process on the gathered batch. All ranks
    must bring batches of equal size.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)

    def forward(
        self,
        image_features: Float[Tensor, "batch features"],
        text_features: Float[Tensor, "batch features"],
        logit_scale: Float[Tensor, "..."],
        text_tokens: Int[Tensor, "batch text"],
        logit_bias: Float[Tensor, "..."] | None = None,
        negative_features: Float[Tensor, "batch features"] | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the loss and the share of images whose best text of all ranks is their caption.

        Args:
            text_tokens: The captions; equal rows are repeats of one caption.
            negative_features: Features of a text for each image that is nearly its caption and wrong. It is added to
                the image's own softmax, not the accuracy (NegCLIP, Yuksekgonul et al. 2023, section 4).
        """
        image_logits, text_logits = self.get_logits(image_features, text_features, logit_scale, logit_bias)
        labels = self.get_ground_truth(image_logits.device, len(image_logits))
        same = (text_tokens.unsqueeze(1) == self._gather(text_tokens)).all(dim=2)
        accuracy = same.gather(1, image_logits.argmax(dim=1, keepdim=True)).float().mean()
        repeats = same.scatter(1, labels.unsqueeze(1), False)
        image_logits = image_logits.masked_fill(repeats, -torch.inf)
        if negative_features is not None:
            negatives = logit_scale * (image_features * negative_features).sum(dim=1, keepdim=True)
            negatives = negatives if logit_bias is None else negatives + logit_bias
            image_logits = torch.cat([image_logits, negatives], dim=1)
        image_loss = cross_entropy(image_logits, labels)
        text_loss = cross_entropy(text_logits.masked_fill(repeats, -torch.inf), labels)
        return (image_loss + text_loss) / 2, accuracy

    def _gather(self, text_tokens: Tensor) -> Tensor:
        if self.world_size == 1:
            return text_tokens
        gathered = [torch.empty_like(text_tokens) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, text_tokens.contiguous())
        return torch.cat(gathered)
