"""What a process holds of a tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is distributed; any other tensor is whole, and itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
