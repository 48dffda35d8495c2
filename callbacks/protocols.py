"""What the callbacks ask of a LightningModule, a scorer and a precision plugin; nothing else of them is used."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from torch import Tensor, nn


@runtime_checkable
class CandidateGenerator(Protocol):
    """A model that draws images or clips of captions."""

    def generate(
        self,
        captions: Sequence[str],
        num_candidates: int = ...,
        *,
        generator: torch.Generator | None = ...,
        **options: Any,
    ) -> UInt8[Tensor, "captions num_candidates 3 *size"]:
        """Draw `num_candidates` of each caption, with random numbers from `generator`, on the model's device.

        The size is (height, width) of images, (frames, height, width) of clips.
        """
        ...


@runtime_checkable
class ImageTextScorer(Protocol):
    """A model that says how well images fit captions."""

    # The command line compares annotations with those of the class it is given: shapes are never equal, Any always is.
    def score(self, images: Any, captions: Any) -> Any:
        """Return one score for each pair, higher is better; takes any number of images and encodes them in chunks.

        Args:
            images: uint8 [images, 3, height, width].
            captions: A sequence of strings.

        Returns:
            Floating point [images, captions].
        """
        ...


@runtime_checkable
class PerBlockScaled(Protocol):
    """A precision plugin with one gradient scale per block of the module."""

    blocks: dict[str, tuple[nn.Module, ...]]
    update_is_skipped: bool

    def loss_scales(self) -> dict[str, float]:
        """Return the scale of each block."""
        ...

    def scale_changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how often each block's scale grew and was divided."""
        ...

    def use_dtype(self, dtype: Any) -> None:
        """Compute the blocks in another type from now on."""
        ...
