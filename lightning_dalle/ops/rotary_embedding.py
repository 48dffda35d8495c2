"""Rotary position embeddings of sequences and of grids of time, height and width (Su et al. 2021, RoFormer)."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Complex, Float, Float64, Int, Shaped
from torch import Tensor

# Which features make a pair: neighbours, or those half a head apart.
Pairing = Literal["interleaved", "half_split"]


class Rotation(NamedTuple):
    """Cosines and sines of the angle of each position and pair, in at least 32 bits whatever autocast says.

    A rotation of angle 0 leaves a position as it is: so text is told apart from a grid.
    """

    cos: Float[Tensor, "#batch tokens half"]
    sin: Float[Tensor, "#batch tokens half"]
    phases: Complex[Tensor, "#batch tokens half"] | None = None

    def for_many(self, pairing: Pairing) -> "Rotation":
        """The same with `phases`, made once for many calls of `rotate`, where those use them."""
        # torch.compile makes one pass over memory of plain operations, and not of complex ones.
        if pairing == "half_split" or torch.compiler.is_compiling():
            return self
        return self._replace(phases=torch.complex(self.cos, self.sin))


def rotary_angles(
    positions: Shaped[Tensor, "*shape"], frequencies: Float64[Tensor, " half"]
) -> Float64[Tensor, "*shape half"]:
    """Radians by which each pair is turned at each position, which may be fractional."""
    return positions.double().unsqueeze(-1) * frequencies.to(positions.device)


def rotate(
    features: Float[Tensor, "batch heads tokens head_dim"], rotation: Rotation, pairing: Pairing = "interleaved"
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
    joined = torch.stack(pair, dim=-1).flatten(-2) if pairing == "interleaved" else torch.cat(pair, dim=-1)
    return joined.to(features.dtype)


def half_split_order(head_dim: int) -> Int[Tensor, " head_dim"]:
    """Places of interleaved features in the order of the half-split pairing, its inverse by `argsort`.

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
