"""Local shards of tensors, and whether tensors are finite."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is distributed; any other tensor is whole, and itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def finite_flag(tensors: Sequence[Tensor], device: torch.device | str) -> Bool[Tensor, ""]:
    """Return whether every entry of every tensor is finite, as a flag on `device` that nobody has waited for."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    # The largest absolute value cannot overflow, as a sum could, and a NaN is larger than all.
    largest = torch._foreach_norm(filled, ord=float("inf"))
    return torch.stack([value.double() for value in largest]).isfinite().all().to(device)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether every entry of every tensor is finite.

    Example:
        >>> all_finite([torch.ones(3), torch.full((2,), 3e38)]), all_finite([torch.tensor([1.0, torch.inf])])
        (True, False)
    """
    return bool(finite_flag(tensors, "cpu"))
