"""What compression left out of past gradients, until it is added to the next."""

import torch
from torch import Tensor

from lightning_dalle.distributed.wire_formats import WireFormat


class ResidualStore:
    """Residuals by the place of their tensor, in a compact format if asked for.

    In the exact format a residual keeps the memory of the gradient that it was left in: handed back as the next
    gradient's accumulator it needs no buffer of its own.
    """

    def __init__(self, format: WireFormat) -> None:
        self._format = format
        self._kept: dict[int, tuple[Tensor, torch.dtype]] = {}

    def __contains__(self, place: object) -> bool:
        return place in self._kept

    def keep(self, place: int, residual: Tensor) -> None:
        """Replace what there was. The residual now belongs to the store."""
        self._kept[place] = (self._format.encode(residual), residual.dtype)

    def take(self, place: int) -> Tensor | None:
        """Hand out the residual, which the store then has no more."""
        if place not in self._kept:
            return None
        encoded, dtype = self._kept.pop(place)
        return self._format.decode(encoded).to(dtype)

    def peek(self, place: int) -> Tensor | None:
        """The residual, which stays; not to be changed."""
        if place not in self._kept:
            return None
        encoded, dtype = self._kept[place]
        return self._format.decode(encoded).to(dtype)

    def norm(self) -> Tensor:
        """The 2-norm of all residuals together."""
        squares = [self._format.decode(encoded).double().square().sum() for encoded, _ in self._kept.values()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)

    @property
    def num_bytes(self) -> int:
        """Memory that the residuals take."""
        return sum(encoded.numel() * encoded.element_size() for encoded, _ in self._kept.values())
