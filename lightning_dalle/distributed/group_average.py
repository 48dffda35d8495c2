"""The mean of many tensors over a process group in one message."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.wire_formats import WireFormat, sum_over_group


def average_over_group(tensors: Sequence[Tensor], format: WireFormat, group: ProcessGroup) -> tuple[list[Tensor], int]:
    """Each tensor's mean over the group, at least single precision, with the same bits in each process.

    All processes must bring tensors of the same shapes. They are divided before they are added, so that the sum cannot
    overflow where the mean does not. In a group of one the tensors are handed back, not copied.

    Returns:
        The means, and the bytes that this process sent.
    """
    if not tensors:
        return [], 0
    if group.size() == 1:
        return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors], 0
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    joined = joined.to(torch.promote_types(joined.dtype, torch.float32)).div_(group.size())
    joined, sent = sum_over_group(joined, format, group)
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], sent
