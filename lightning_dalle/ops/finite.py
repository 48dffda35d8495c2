"""Whether tensors hold infinities or NaNs."""

from collections.abc import Sequence

import torch
from torch import Tensor


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every entry of every tensor is finite.

    Reads finite tensors once: their sums say so, unless a sum overflows.

    Example:
        >>> all_finite([torch.ones(3), torch.full((2,), 3e38)]), all_finite([torch.tensor([1.0, torch.inf])])
        (True, False)
    """
    if not tensors:
        return True
    sums = torch.stack([tensor.sum().double() for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)
