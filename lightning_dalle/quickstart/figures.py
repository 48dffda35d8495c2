"""Figures of a run beside the values they are to reach."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxtyping import UInt8
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

MAX_PSNR = 99.0
"""Stands for an image without any error, whose ratio is infinite."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured value.

    Args:
        key: Name in `metrics.json`.
        label: Name for readers.
        definition: How it was measured.
        n: Pictures or captions it was measured on.
        target: Least value to reach, if there is one.
        strict: Whether the target itself is not enough.
        unit: Behind the value. Shares are of 1, and shown in `%`; differences of shares in `points`.
    """

    key: str
    label: str
    definition: str
    value: float
    n: int
    target: float | None = None
    strict: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        return self.value > self.target if self.strict else self.value >= self.target

    @property
    def value_text(self) -> str:
        """The value as readers see it."""
        return self._text(self.value)

    @property
    def target_text(self) -> str:
        """The target as readers see it; empty without one."""
        if self.target is None:
            return ""
        return f"{'>' if self.strict else '≥'} {self._text(self.target)}"

    def as_mapping(self) -> dict[str, Any]:
        """All fields, and whether the target is met."""
        return {**dataclasses.asdict(self), "met": self.met}

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "points":
            return f"{100 * value:+.1f} points" if value else "0 points"
        return f"{value:.1f} dB" if self.unit == "dB" else f"{value:.3g}"


def mean_psnr(
    reconstructions: UInt8[Tensor, "images 3 height width"], images: UInt8[Tensor, "images 3 height width"]
) -> float:
    """The ratio in dB of each image, averaged over the images."""
    ratios = peak_signal_noise_ratio(
        reconstructions.double(), images.double(), data_range=255.0, dim=(1, 2, 3), reduction="none"
    )
    return float(ratios.clamp(max=MAX_PSNR).mean())
