"""The mean over all processes of gradients that are not sharded."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed, nn

from lightning_dalle.distributed.group_average import average_over_group
from lightning_dalle.distributed.wire_formats import WIRE_FORMATS

# Elements of one message; its memory is taken beside the gradients'.
_BUCKET = 2**24


@torch.no_grad()
def average_plain_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Replace each gradient by its mean, with the same bits everywhere; all processes must call it.

    A parameter that no process has a gradient of has none afterwards; where some have none, those count as 0.

    Returns:
        The squared norm of all means, in double precision.
    """
    world = distributed.group.WORLD
    if not parameters or world is None:
        return torch.zeros((), dtype=torch.float64)
    format, device = WIRE_FORMATS["fp32"], parameters[0].device
    used = torch.tensor([part.grad is not None for part in parameters], dtype=torch.float32, device=device)
    (used,), _ = average_over_group([used], format, world)
    squares = []
    for bucket in _buckets([part for part, share in zip(parameters, used.tolist(), strict=True) if share > 0]):
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in bucket]
        means, _ = average_over_group(gradients, format, world)
        squares += [mean.double().square().sum() for mean in means]
        for parameter, mean in zip(bucket, means, strict=True):
            parameter.grad = mean.to(parameter.dtype)
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(part.numel() for part in bucket) + parameter.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
