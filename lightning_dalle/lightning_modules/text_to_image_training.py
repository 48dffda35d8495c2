"""What training a text-to-image transformer takes beside the network: settings, and image tokens that are kept."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.models.discrete_vae import DiscreteVAE


@dataclass(frozen=True, kw_only=True)
class TextToImageTrainingConfig:
    """Settings of `TextToImageModule`; the defaults are the paper's (Ramesh et al. 2021, section 2.2 and appendix B).

    Args:
        optimizer: The paper has AdamW alone; the small recipes learn more in as many steps with Muon.
        schedule: The paper halves the learning rate on plateaus; the small recipes, whose length is known, take a
            cosine.
        text_loss_weight: Weight of the text's cross-entropy; the image's has the rest of 1.
        caption_dropout: Share of training captions replaced by padding, which guidance needs; the paper has none.
        image_token_noise: Share of the image tokens that training shows as random ones, and asks for the right ones;
            the paper has none. A model that always saw perfect beginnings trusts them more than the caption, and goes
            astray after the first unlucky token that it draws.
        kept_image_tokens: Images whose tokens are kept instead of encoded anew, where they repeat unaugmented.
        seed: Seeds caption dropout and token noise, together with the step, batch and share of the data.

    Raises:
        ValueError: If a value is out of its range.
    """

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4.5e-4, beta2=0.96, weight_decay=4.5e-2)
    schedule: ScheduleConfig = ScheduleConfig(name="plateau", warmup_steps=5000)
    text_loss_weight: float = 0.125
    caption_dropout: float = 0.0
    image_token_noise: float = 0.0
    kept_image_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            not_negative=("kept_image_tokens",),
            shares=("text_loss_weight", "caption_dropout", "image_token_noise"),
        )


class ImageTokenCache:
    """Encodes images by a frozen discrete VAE, each only once as long as there is room.

    Images are recognised by their pixels, so that any data module will do. It pays where the same images come again
    unaugmented. Once full, it takes in no more: a set that does not fit would otherwise push out what comes next.

    Args:
        capacity: Images whose tokens are kept, in main memory; 0 encodes every time.

    Raises:
        ValueError: If the capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity ({capacity}) must be at least 0")
        self.capacity = capacity
        self._tokens: dict[bytes, Tensor] = {}

    def encode(
        self,
        discrete_vae: DiscreteVAE,
        images: UInt8[Tensor, "batch 3 height width"] | Float[Tensor, "batch 3 height width"],
    ) -> Int[Tensor, "batch tokens"]:
        """Return the tokens that `discrete_vae.encode` gives, for one and the same network at every call."""
        if self.capacity == 0:
            return discrete_vae.encode(images)
        keys = [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images.cpu()]
        new = [index for index, key in enumerate(keys) if key not in self._tokens]
        encoded = dict(zip(new, _encode(discrete_vae.encode, images[new]), strict=True))
        tokens = [encoded[index] if index in encoded else self._tokens[key] for index, key in enumerate(keys)]
        for index in new[: max(0, self.capacity - len(self._tokens))]:
            self._tokens[keys[index]] = encoded[index]
        return torch.stack(tokens).to(images.device)


def _encode(encode: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    return list(encode(images).cpu()) if len(images) else []
