"""Mean gradients over replicas, and the protocol of everything that synchronizes gradients."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_dalle.distributed.powersgd.comm import WIRE_FORMATS, average_over_group
from lightning_dalle.ops.finite import all_finite, to_local

# Elements of one message; its memory is taken beside that of the gradients.
_BUCKET = 2**24


class GradientSynchronizer(Protocol):
    """Synchronizer of gradients, which exchanges them once a step, whatever is accumulated before.

    A step calls `begin_backward` before each backward pass, `begin_last_backward` before the last one, `synchronize`
    after it, and `release` after the optimizer.
    """

    @property
    def has_error_feedback(self) -> bool:
        """Whether gradients of one step enter the next, so that all must have the same scale."""
        ...

    def begin_backward(self) -> None:
        """Prepare the gradients for a backward pass."""
        ...

    def begin_last_backward(self) -> None:
        """Say that the next backward pass is the last one before `synchronize`."""
        ...

    def synchronize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient of the parameters that are trained now by its mean; all processes must call it."""
        ...

    def release(self) -> None:
        """Free what the optimizer no longer needs."""
        ...

    def close(self) -> None:
        """Remove hooks from the parameters."""
        ...


class MeanGradients:
    """Averages the gradients of a step over replicas, uncompressed.

    Gradients that are not finite stay, as under DDP, and so are not finite on any replica.

    Args:
        replicate_group: Processes that hold the same shard, or the same parameters where nothing is sharded.
    """

    has_error_feedback = False

    def __init__(self, replicate_group: ProcessGroup) -> None:
        self._replicate_group = replicate_group

    def begin_backward(self) -> None:
        """Do nothing: gradients accumulate on nothing."""

    def begin_last_backward(self) -> None:
        """Do nothing: gradients are sent after the backward pass."""

    def synchronize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient by its mean over all replicas; all processes must call it."""
        average_gradients(list(parameters.values()), self._replicate_group)

    def release(self) -> None:
        """Do nothing: nothing stands beside the gradients."""

    def close(self) -> None:
        """Do nothing: there are no hooks."""


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], replicate_group: ProcessGroup) -> None:
    """Replace each gradient by its mean over the group, to the same bits on each process; all of them must call it.

    Shards are averaged over their replicas, as FSDP2 has averaged them over a replica's processes. A parameter that no
    process has a gradient of keeps none; where some have none, those count as 0.
    """
    used = _used(parameters, replicate_group)
    for bucket in _buckets([parameter for parameter, is_used in zip(parameters, used, strict=True) if is_used]):
        gradients = [torch.zeros_like(to_local(part)) if part.grad is None else to_local(part.grad) for part in bucket]
        means, _ = average_over_group(gradients, WIRE_FORMATS["fp32"], replicate_group)
        for parameter, mean in zip(bucket, means, strict=True):
            parameter.grad = distribute_like(mean.to(parameter.dtype), parameter)


@torch.no_grad()
def spread_non_finite(parameters: Sequence[nn.Parameter]) -> None:
    """Make each gradient NaN that is not finite on any process, and the others 0; all processes must call it.

    So whoever looks for such gradients comes to one verdict on all processes, and of each parameter. If all are finite,
    all become NaN: it was their norm that is not.
    """
    device = to_local(parameters[0]).device
    flags = torch.tensor(
        [part.grad is not None and not all_finite([to_local(part.grad)]) for part in parameters],
        dtype=torch.int32,
        device=device,
    )
    distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
    spoiled = [bool(flag) for flag in flags.tolist()]
    for parameter, is_spoiled in zip(parameters, spoiled, strict=True):
        value = torch.nan if is_spoiled or not any(spoiled) else 0.0
        parameter.grad = distribute_like(torch.full_like(to_local(parameter), value), parameter)


def squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the squared norm of the local shards of all gradients, in double precision."""
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else "cpu")
    for parameter in parameters:
        if parameter.grad is not None:
            total += to_local(parameter.grad).double().square().sum()
    return total


def distribute_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor whose local shard is `local`, distributed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _used(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> list[bool]:
    """Return for each parameter whether any process of the group has a gradient of it."""
    if not parameters:
        return []
    present = [part.grad is not None for part in parameters]
    flags = torch.tensor(present, dtype=torch.int32, device=parameters[0].device)
    distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(part.numel() for part in bucket) + parameter.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
