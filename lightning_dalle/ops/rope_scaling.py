"""Frequencies of rotary embeddings on axes that are longer than in training, as small objects, one for each axis.

`trained` and `target` are numbers of points of the axis, in training and now.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float64
from torch import Tensor


def rotary_frequencies(dim: int, base: float) -> Float64[Tensor, " half"]:
    """`base ** (-2 i / dim)`, from the highest (Su et al. 2021, RoFormer, section 3.2.2).

    Raises:
        ValueError: If `dim` is not even and positive, or `base` not above 0.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim ({dim}) must be even and at least 2: rotations turn pairs")
    if not base > 0:
        raise ValueError(f"base ({base}) must be positive")
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


@dataclass(frozen=True)
class ExtrapolationPolicy(ABC):
    """How an axis of `target` points is told to a network trained on `trained` points."""

    kind: str = field(init=False)

    @abstractmethod
    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return radians that each pair of the axis turns from one point to the next."""

    def amplitude(self, trained: int, target: int) -> float:
        """Return what rotated queries and keys are multiplied with."""
        return 1.0


@dataclass(frozen=True)
class Default(ExtrapolationPolicy):
    """The frequencies of training: points beyond it get angles that were never seen."""

    kind: str = field(default="default", init=False)

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return the frequencies of training."""
        return rotary_frequencies(dim, base)


@dataclass(frozen=True)
class PositionInterpolation(ExtrapolationPolicy):
    """All points within the trained range (Chen et al. 2023), on shorter axes stretched to it.

    Args:
        alignment: `endpoints` lays the last point on the last trained one; `ratio` divides by target / trained, as
            CogVideoX 1.0's `linspace`. An axis of one point stays where it is.
    """

    alignment: Literal["endpoints", "ratio"] = "endpoints"
    kind: str = field(default="position_interpolation", init=False)

    def __post_init__(self) -> None:
        if self.alignment not in ("endpoints", "ratio"):
            raise ValueError(f"alignment ({self.alignment!r}) must be 'endpoints' or 'ratio'")

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return the frequencies of training, divided.

        Raises:
            ValueError: If end points of a longer axis are to lie on those of a trained axis of one point.
        """
        if target == 1:
            return rotary_frequencies(dim, base)
        if self.alignment == "ratio":
            return rotary_frequencies(dim, base) * (trained / target)
        if trained == 1:
            raise ValueError(
                f"an axis of {target} points has no place between the ends of one trained on 1; use Default"
            )
        return rotary_frequencies(dim, base) * ((trained - 1) / (target - 1))


@dataclass(frozen=True)
class NTKAware(ExtrapolationPolicy):
    """A base larger by s ** (d / (d - 2)), s = target / trained: the highest frequency stays, the lowest is 1 / s."""

    kind: str = field(default="ntk_aware", init=False)

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return the frequencies of the larger base; those of training on axes that are no longer.

        Raises:
            ValueError: If the axis has one pair only, whose frequency no base changes.
        """
        if dim == 2:
            raise ValueError(f"dim ({dim}) must be at least 4 for NTKAware: the one frequency of a pair has no base")
        return rotary_frequencies(dim, base * _growth(trained, target) ** (dim / (dim - 2)))


@dataclass(frozen=True)
class YaRN(ExtrapolationPolicy):
    """By bands: pairs that turn often stay, those that turn rarely are interpolated (Peng et al. 2023, section 3.2).

    Args:
        slow_rotations: Pairs that turn less often than this over the trained axis are interpolated wholly; the paper's
            alpha, chosen there for text.
        fast_rotations: Frequencies that turn more often are left as they are; the paper's beta.
        temperature: Amplify queries and keys of the axis by 0.1 ln(target / trained) + 1.
    """

    slow_rotations: float = 1.0
    fast_rotations: float = 32.0
    temperature: bool = True
    kind: str = field(default="yarn", init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.slow_rotations < self.fast_rotations:
            raise ValueError(
                f"slow_rotations ({self.slow_rotations}) must be at least 0 and below "
                f"fast_rotations ({self.fast_rotations})"
            )

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return a blend of those of training and the interpolated ones."""
        frequencies = rotary_frequencies(dim, base)
        rotations = trained * frequencies / (2 * math.pi)
        kept = (rotations - self.slow_rotations) / (self.fast_rotations - self.slow_rotations)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / _growth(trained, target))

    def amplitude(self, trained: int, target: int) -> float:
        """Return the root of the paper's 1 / t, as it stands at both factors of a score."""
        return 0.1 * math.log(_growth(trained, target)) + 1 if self.temperature else 1.0


@dataclass(frozen=True)
class RIFLEx(ExtrapolationPolicy):
    """One frequency is lowered so that the axis stays within its period (Zhao et al. 2025), against repeated clips.

    For time only. Nothing changes where the axis fits into the period anyway.

    Args:
        component: Which pair, from 0; None is the one whose period is nearest to the trained length.
    """

    component: int | None = None
    kind: str = field(default="riflex", init=False)

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return the frequencies of training but for one of 0.9 * 2 pi / target.

        Raises:
            ValueError: If there is no such component.
        """
        frequencies = rotary_frequencies(dim, base)
        if self.component is not None and not 0 <= self.component < len(frequencies):
            raise ValueError(f"component ({self.component}) must be in 0..{len(frequencies) - 1}, the axis's pairs")
        periods = 2 * math.pi / frequencies
        component = int((periods - trained).abs().argmin()) if self.component is None else self.component
        if target > periods[component]:
            frequencies[component] = 0.9 * 2 * math.pi / target
        return frequencies


@dataclass(frozen=True)
class FrameRateAware(ExtrapolationPolicy):
    """Points in seconds instead of frames (NVIDIA 2025, Cosmos): for time only.

    Args:
        trained_fps: Frames per second that the frequencies are meant for.
        fps: Frames per second of the clip.
    """

    trained_fps: float
    fps: float
    kind: str = field(default="frame_rate_aware", init=False)

    def __post_init__(self) -> None:
        if not (self.trained_fps > 0 and self.fps > 0):
            raise ValueError(f"trained_fps ({self.trained_fps}) and fps ({self.fps}) must be positive")

    def frequencies(self, dim: int, base: float, trained: int, target: int) -> Float64[Tensor, " half"]:
        """Return the frequencies of training times trained_fps / fps."""
        return rotary_frequencies(dim, base) * (self.trained_fps / self.fps)


POLICIES: dict[str, type[ExtrapolationPolicy]] = {
    "default": Default,
    "position_interpolation": PositionInterpolation,
    "ntk_aware": NTKAware,
    "yarn": YaRN,
    "riflex": RIFLEx,
    "frame_rate_aware": FrameRateAware,
}
TIME_ONLY = (RIFLEx, FrameRateAware)


def as_policy(value: ExtrapolationPolicy | str | Mapping[str, Any]) -> ExtrapolationPolicy:
    """Return a policy from its kind, or from a mapping with its kind and fields, as `dataclasses.asdict` gives it.

    Raises:
        ValueError: If the kind or a field is unknown.
    """
    if isinstance(value, ExtrapolationPolicy):
        return value
    settings = {"kind": value} if isinstance(value, str) else dict(value)
    kind = settings.pop("kind", None)
    if kind not in POLICIES:
        raise ValueError(f"policy ({value!r}) must have a kind among {', '.join(POLICIES)}")
    names = [entry.name for entry in dataclasses.fields(POLICIES[kind]) if entry.init]
    if unknown := sorted(set(settings) - set(names)):
        raise ValueError(f"policy {kind!r} has no fields {unknown}; it has {names}")
    return POLICIES[kind](**settings)


def _growth(trained: int, target: int) -> float:
    return max(1.0, target / trained)
