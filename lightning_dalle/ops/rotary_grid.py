"""The rotary embedding of a network over grids of time, height and width: its settings and its cached tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, get_args

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rotary_embedding import Pairing, Rotation, grid_coordinates, rotary_angles
from lightning_dalle.ops.rotary_scaling import TIME_ONLY, Direct, ExtrapolationPolicy, as_policy

# What a policy for time, height and width may be written as.
Policies = Sequence[ExtrapolationPolicy | str | Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RotaryGridConfig:
    """Settings of a 3-D rotary embedding; each triple is for time, height and width.

    Args:
        trained_grid: Tokens of the longest axes in training, to which policies compare.
        axis_dims: Features of a head that each axis turns; None is 1/4, 3/8, 3/8 of the head.
        base: Of each axis's frequencies, which start anew from the highest on each.
        coordinate_scale: What coordinates are multiplied with.
        policies: In force in training, for grids that differ from `trained_grid`: objects, kinds, or mappings of a kind
            and its fields.

    Raises:
        ValueError: If a value is out of range, or a policy for time stands on another axis.
    """

    trained_grid: Grid
    axis_dims: tuple[int, int, int] | None = None
    base: tuple[float, float, float] = (10000.0, 10000.0, 10000.0)
    coordinate_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    pairing: Pairing = "interleaved"
    policies: tuple[Any, Any, Any] = (Direct(), Direct(), Direct())

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "pairing" and value is not None:
                if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 3:
                    raise ValueError(f"{item.name} ({value!r}) must have three values: time, height and width")
                object.__setattr__(self, item.name, tuple(value))
        for name in ("trained_grid", "base", "coordinate_scale"):
            if not all(number > 0 for number in getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)} must be positive on each axis")
        if self.axis_dims is not None and any(dim < 2 or dim % 2 for dim in self.axis_dims):
            raise ValueError(f"axis_dims {self.axis_dims} must be even and at least 2 on each axis")
        if self.pairing not in get_args(Pairing):
            raise ValueError(f"pairing ({self.pairing!r}) must be one of {', '.join(get_args(Pairing))}")
        object.__setattr__(self, "policies", resolve_policies(self.policies))

    def split(self, head_dim: int) -> tuple[int, int, int]:
        """Features of each axis for heads of `head_dim`.

        Raises:
            ValueError: If the head does not divide so.
        """
        if self.axis_dims is None:
            if head_dim % 16:
                raise ValueError(f"head_dim ({head_dim}) must be a multiple of 16 to be split 1/4, 3/8, 3/8 into pairs")
            return head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8
        if sum(self.axis_dims) != head_dim:
            raise ValueError(f"axis_dims {self.axis_dims} must add up to head_dim ({head_dim})")
        return self.axis_dims


def resolve_policies(policies: Policies) -> tuple[ExtrapolationPolicy, ExtrapolationPolicy, ExtrapolationPolicy]:
    """Policies of time, height and width as objects.

    Raises:
        ValueError: If there are not three, one is unknown, or one for time stands on another axis.
    """
    if isinstance(policies, str) or len(policies) != 3:
        raise ValueError(f"policies ({policies!r}) must be three: of time, height and width")
    time, height, width = map(as_policy, policies)
    for axis, policy in (("height", height), ("width", width)):
        if isinstance(policy, TIME_ONLY):
            raise ValueError(f"policies has {type(policy).__name__} on {axis}; it is for time, the first of the three")
    return time, height, width


def grid_angles(
    coordinates: Shaped[Tensor, "*batch tokens 3"],
    config: RotaryGridConfig,
    head_dim: int,
    grid: Grid,
    policies: Policies | None = None,
) -> tuple[Float64[Tensor, "*batch tokens half"], Float64[Tensor, " half"]]:
    """Angles at explicit coordinates within a clip of `grid`, and the amplitude of each pair.

    Args:
        policies: Instead of the configuration's.
    """
    angles, amplitudes = [], []
    axes = zip(
        config.split(head_dim),
        config.base,
        config.coordinate_scale,
        config.trained_grid,
        grid,
        config.policies if policies is None else resolve_policies(policies),
        strict=True,
    )
    for axis, (dim, base, scale, trained, target, policy) in enumerate(axes):
        frequencies = policy.frequencies(dim, base, trained, target)
        angles.append(rotary_angles(scale * coordinates[..., axis], frequencies))
        amplitudes.append(torch.full_like(frequencies, policy.amplitude(trained, target)))
    return torch.cat(angles, dim=-1), torch.cat(amplitudes)


@lru_cache(maxsize=64)
def grid_rotation(
    config: RotaryGridConfig,
    head_dim: int,
    grid: Grid,
    policies: tuple[ExtrapolationPolicy, ExtrapolationPolicy, ExtrapolationPolicy] | None = None,
    text_tokens: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Rotation:
    """The table of a whole clip in raster order, behind as many tokens of text that stay unrotated.

    Angles are in float64, whatever the table is.
    """
    # A table first built while sampling in inference mode is still used in training later.
    with torch.inference_mode(mode=False):
        angles, amplitudes = grid_angles(grid_coordinates(grid), config, head_dim, grid, policies)
        still = torch.ones(text_tokens, angles.shape[-1], dtype=torch.float64)
        cos = torch.cat([still, angles.cos() * amplitudes])
        sin = torch.cat([torch.zeros_like(still), angles.sin() * amplitudes])
        return Rotation(*(table.unsqueeze(0).to(device, dtype) for table in (cos, sin)))
