"""Image tokens that are kept instead of encoded anew."""

import hashlib
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lightning_dalle.models.discrete_vae import DiscreteVAE


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
        """The tokens that `discrete_vae.encode` gives, for one and the same network at every call."""
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
