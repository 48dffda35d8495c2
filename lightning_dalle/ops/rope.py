"""Rotary position embeddings of one axis and of grids, and Fourier position features."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Complex, Float, Float64, Int, Shaped
from torch import Tensor

from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rope_scaling import TIME_ONLY, Default, ExtrapolationPolicy, as_policy, rotary_frequencies

# Which features make a pair: neighbours, or those half a head apart.
Pairing = Literal["interleaved", "half_split"]


class RotaryEmbedding(NamedTuple):
    """Cosines and sines of the angle of each position and pair, in at least 32 bits whatever autocast says.

    A rotation of angle 0 leaves a position as it is: so text is told apart from a grid.
    """

    cos: Float[Tensor, "#batch tokens half"]
    sin: Float[Tensor, "#batch tokens half"]
    phases: Complex[Tensor, "#batch tokens half"] | None = None

    def for_many(self, pairing: Pairing) -> "RotaryEmbedding":
        """Return the same with `phases`, made once for many calls of `apply_rotary_emb`, where those use them."""
        # torch.compile makes one pass over memory of plain operations, and not of complex ones.
        if pairing == "half_split" or torch.compiler.is_compiling():
            return self
        return self._replace(phases=torch.complex(self.cos, self.sin))


def rotary_angles(
    positions: Shaped[Tensor, "*shape"], frequencies: Float64[Tensor, " half"]
) -> Float64[Tensor, "*shape half"]:
    """Return radians by which each pair is turned at each position, which may be fractional."""
    return positions.double().unsqueeze(-1) * frequencies.to(positions.device)


def apply_rotary_emb(
    features: Float[Tensor, "batch heads tokens head_dim"], rotation: RotaryEmbedding, pairing: Pairing = "interleaved"
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Queries or keys turned pair by pair; scores then depend on differences of positions alone."""
    wide = features.to(rotation.cos.dtype)
    phases = rotation.phases if rotation.phases is not None else rotation.for_many(pairing).phases
    if phases is not None:
        turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * phases.unsqueeze(1)
        return torch.view_as_real(turned).flatten(-2).to(features.dtype)
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)  # [batch, 1, tokens, half]
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1) if pairing == "interleaved" else wide.chunk(2, dim=-1)
    pair = first * cos - second * sin, first * sin + second * cos
    rotated = torch.stack(pair, dim=-1).flatten(-2) if pairing == "interleaved" else torch.cat(pair, dim=-1)
    return rotated.to(features.dtype)


def half_split_order(head_dim: int) -> Int[Tensor, " head_dim"]:
    """Return places of interleaved features in the order of the half-split pairing, its inverse by `argsort`.

    Weights that were trained with one pairing serve the other only if the rows of their query and key projections (and
    the gains of a norm on them) are permuted so.

    Example:
        >>> half_split_order(6).tolist()
        [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(head_dim).view(-1, 2).T.flatten()


def grid_coordinates(grid: tuple[int, int, int]) -> Int[Tensor, "tokens 3"]:
    """Time, row and column of each token of a grid in raster order."""
    axes = [torch.arange(length) for length in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


# What a policy for time, height and width may be written as.
Policies = Sequence[ExtrapolationPolicy | str | Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RotaryGridConfig:
    """Settings of a 3-D rotary embedding; each triple is for time, height and width.

    Args:
        original_max_position_embeddings: Tokens of the longest axes in training, to which policies compare.
        axis_dims: Features of a head that each axis turns; None is 1/4, 3/8, 3/8 of the head.
        base: Base of each axis's frequencies, which start anew from the highest on each.
        coordinate_scale: What coordinates are multiplied with.
        policies: In force in training, for grids that differ from `original_max_position_embeddings`: objects,
            kinds, or mappings of a kind and its fields.

    Raises:
        ValueError: If a value is out of range, or a policy for time stands on another axis.
    """

    original_max_position_embeddings: Grid
    axis_dims: tuple[int, int, int] | None = None
    base: tuple[float, float, float] = (10000.0, 10000.0, 10000.0)
    coordinate_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    pairing: Pairing = "interleaved"
    policies: tuple[Any, Any, Any] = (Default(), Default(), Default())

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "pairing" and value is not None:
                if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 3:
                    raise ValueError(f"{item.name} ({value!r}) must have three values: time, height and width")
                object.__setattr__(self, item.name, tuple(value))
        for name in ("original_max_position_embeddings", "base", "coordinate_scale"):
            if not all(number > 0 for number in getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)} must be positive on each axis")
        if self.axis_dims is not None and any(dim < 2 or dim % 2 for dim in self.axis_dims):
            raise ValueError(f"axis_dims {self.axis_dims} must be even and at least 2 on each axis")
        if self.pairing not in get_args(Pairing):
            raise ValueError(f"pairing ({self.pairing!r}) must be one of {', '.join(get_args(Pairing))}")
        object.__setattr__(self, "policies", resolve_policies(self.policies))

    def split(self, head_dim: int) -> tuple[int, int, int]:
        """Return the features of each axis for heads of `head_dim`.

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
        config.original_max_position_embeddings,
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
) -> RotaryEmbedding:
    """Return the table of a whole clip in raster order, behind as many tokens of text that stay unrotated.

    Angles are in float64, whatever the table is.
    """
    # A table first built while sampling in inference mode is still used in training later.
    with torch.inference_mode(mode=False):
        angles, amplitudes = grid_angles(grid_coordinates(grid), config, head_dim, grid, policies)
        still = torch.ones(text_tokens, angles.shape[-1], dtype=torch.float64)
        cos = torch.cat([still, angles.cos() * amplitudes])
        sin = torch.cat([torch.zeros_like(still), angles.sin() * amplitudes])
        return RotaryEmbedding(*(table.unsqueeze(0).to(device, dtype) for table in (cos, sin)))


def position_frequencies(original_max_position_embeddings: Grid, num_frequencies: int) -> Float64[Tensor, "waves 3"]:
    """Return radians that each wave turns from one token to the next along time, height and width.

    Each has its own slant: a sum of waves along single axes could not tell "early and on the left" without learning the
    product. From half a turn over the trained axis to half a turn over two tokens, evenly spread in the logarithm by a
    Sobol sequence, so that every program draws the same.
    """
    # The first two points are a corner and the middle, which would not turn at all.
    points = torch.quasirandom.SobolEngine(3).draw(num_frequencies + 2, dtype=torch.float64)[2:]
    signed = 2 * points - 1
    highest = math.pi / 2
    lowest = torch.tensor(
        [min(math.pi / length, highest) for length in original_max_position_embeddings], dtype=torch.float64
    )
    return signed.sign() * lowest * (highest / lowest) ** signed.abs()


@lru_cache(maxsize=64)
def position_features(
    config: RotaryGridConfig,
    head_dim: int,
    grid: Grid,
    policies: tuple[ExtrapolationPolicy, ExtrapolationPolicy, ExtrapolationPolicy],
    num_frequencies: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "tokens features"]:
    """Cosines of each wave at the tokens of a clip in raster order, then sines.

    Policies move them as they move the highest frequency of their axis, which tells neighbours apart: positions are
    interpolated here where all frequencies are, and as they are elsewhere.
    """
    axes = zip(
        config.split(head_dim), config.base, config.original_max_position_embeddings, grid, policies, strict=True
    )
    # A table first built while sampling in inference mode is still used in training later; and the sequence behind the
    # waves is drawn on the CPU, whatever the default device.
    with torch.inference_mode(mode=False), torch.device("cpu"):
        paces = torch.stack(
            [
                policy.frequencies(dim, base, trained, target)[0] / rotary_frequencies(dim, base)[0]
                for dim, base, trained, target, policy in axes
            ]
        )
        angles = (
            grid_coordinates(grid).double()
            @ (paces * position_frequencies(config.original_max_position_embeddings, num_frequencies)).T
        )
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, dtype)
