"""Gradients averaged over replicas, and what strategies ask of whoever averages them."""

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
    """What exchanges gradients once a step, whatever is accumulated before.

    A step calls `begin_backward` before each backward pass, `begin_last_backward` before the last one, `synchronize`
    after it, one of the clipping methods if there is something to clip, and `release` after the optimizer.
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

    def synchronize(self, parameters: Mapping[str, nn.Parameter], keep_non_finite: bool = False) -> bool:
        """Replace each gradient by its mean over all processes, and return whether there is something to step with."""
        ...

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the synchronized gradient down to this norm, where it is larger."""
        ...

    def clip_by_value(self, largest: float) -> None:
        """Clamp each entry of the synchronized gradient."""
        ...

    def release(self) -> None:
        """Free what the optimizer no longer needs."""
        ...

    def close(self) -> None:
        """Remove hooks from the parameters."""
        ...


class MeanGradients:
    """Averages the gradients of a step over replicas, uncompressed.

    Gradients that are not finite stay, as under DDP. Processes that each look at their own shards, as a GradScaler does,
    must come to one verdict: with `keep_non_finite` a gradient that is not finite anywhere makes one not finite on every
    process.

    Args:
        replicate_group: Processes that hold the same shard, or the same parameters where nothing is sharded.
        shard_group: Processes that hold the shards of one replica.
    """

    has_error_feedback = False

    def __init__(self, replicate_group: ProcessGroup, shard_group: ProcessGroup) -> None:
        self._replicate_group, self._shard_group = replicate_group, shard_group
        self._parameters: list[nn.Parameter] = []

    def begin_backward(self) -> None:
        """Do nothing: gradients accumulate on nothing."""

    def begin_last_backward(self) -> None:
        """Do nothing: gradients are sent after the backward pass."""

    @torch.no_grad()
    def synchronize(self, parameters: Mapping[str, nn.Parameter], keep_non_finite: bool = False) -> bool:
        """Replace each gradient by its mean over all processes; all of them must call it."""
        self._parameters = list(parameters.values())
        squared_norm = average_gradients(self._parameters, self._replicate_group, self._shard_group)
        if keep_non_finite and not bool(squared_norm.isfinite()):
            gradients = local_gradients(self._parameters)
            if all_finite(gradients):
                gradients[0].view(-1)[:1].fill_(torch.inf)
        return True

    @torch.no_grad()
    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the synchronized gradient down to this norm, where it is larger."""
        # Taken anew: a GradScaler has divided the gradients since.
        norm = _squared_norm(self._parameters, self._shard_group).sqrt()
        scale_to_norm(local_gradients(self._parameters), norm, max_norm)

    @torch.no_grad()
    def clip_by_value(self, largest: float) -> None:
        """Clamp each entry of the synchronized gradient."""
        for gradient in local_gradients(self._parameters):
            gradient.clamp_(-largest, largest)

    def release(self) -> None:
        """Do nothing: nothing stands beside the gradients."""

    def close(self) -> None:
        """Do nothing: there are no hooks."""


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter], replicate_group: ProcessGroup, shard_group: ProcessGroup
) -> Tensor:
    """Replace each gradient by its mean over all processes, with the same bits everywhere; all of them must call it.

    Shards are averaged over their replicas, as FSDP2 has averaged them over a replica's processes. Tensors that are not
    sharded are averaged over all processes. A parameter that no process has a gradient of keeps none; where some have
    none, those count as 0.

    Returns:
        The squared norm of all means over all shards, in double precision.
    """
    world = distributed.group.WORLD
    assert world is not None
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    unsharded = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    for some, group in ((sharded, replicate_group), (unsharded, world)):
        used = _used(some, group)
        for bucket in _buckets([parameter for parameter, is_used in zip(some, used, strict=True) if is_used]):
            gradients = [
                torch.zeros_like(to_local(part)) if part.grad is None else to_local(part.grad) for part in bucket
            ]
            means, _ = average_over_group(gradients, WIRE_FORMATS["fp32"], group)
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad = distribute_like(mean.to(parameter.dtype), parameter)
    return _squared_norm(parameters, shard_group)


def _used(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> list[bool]:
    """Return for each parameter whether any process of the group has a gradient of it."""
    if not parameters:
        return []
    flags = [part.grad is not None for part in parameters]
    (shares,), _ = average_over_group(
        [torch.tensor(flags, dtype=torch.float32, device=parameters[0].device)], WIRE_FORMATS["fp32"], group
    )
    return [share > 0 for share in shares.tolist()]


def _squared_norm(parameters: Sequence[nn.Parameter], shard_group: ProcessGroup) -> Tensor:
    device = parameters[0].device if parameters else "cpu"
    of_shards, of_others = torch.zeros((2,), dtype=torch.float64, device=device).unbind()
    for parameter in parameters:
        if parameter.grad is not None:
            square = to_local(parameter.grad).double().square().sum()
            (of_shards if isinstance(parameter, DTensor) else of_others).add_(square)
    if shard_group.size() > 1:
        # Gathered, not summed by the back end: added in one order, all replicas get the same bits.
        values = [torch.empty_like(of_shards) for _ in range(shard_group.size())]
        distributed.all_gather(values, of_shards.contiguous(), group=shard_group)
        of_shards = torch.stack(values).sum()
    return of_shards + of_others


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the local shard of each gradient that there is."""
    return [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def scale_to_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm, in place, such that it is at most `max_norm`."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.dtype))


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


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(part.numel() for part in bucket) + parameter.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
