"""Overlapped all-reduce of P: it is sent while the backward pass that makes the gradients goes on."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.ops.finite import to_local

# More buckets would overlap more, but each costs processor time and headers of its own.
_BUCKETS = 3


class OverlappedAllReduce:
    """All-reduces P of each gradient as soon as the last backward pass of a step has made it.

    Collectives must be called in the same order on all processes of a group, whatever graph each one has. So

    1. the first step only records the order in which gradients come, and in how many parts each does (several where
       activation checkpoints run backward passes of their own); nothing is overlapped yet;
    2. rank 0's order is broadcast and split into a few buckets of about equal size;
    3. from then on a bucket is sent once all its gradients are complete and all buckets before it were sent;
    4. what never comes, such as the gradient of an unused parameter, is sent when P is asked for.

    A later change of a gradient, as `on_after_backward` may make it, counts for the mean, but not for P.

    Args:
        parameters: In the order of the compressor's tensors.
    """

    def __init__(self, compressor: PowerSGD, parameters: Sequence[Tensor]) -> None:
        self._compressor = compressor
        self._parameters = parameters
        self._matrices = {matrix.index: matrix for matrix in compressor.plan.matrices}
        self._buckets: list[list[int]] = []
        self._num_parts: Counter[int] = Counter()
        self._reset(is_listening=False)
        self._handles = [
            parameters[index].register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index in self._matrices
        ]

    def begin(self) -> None:
        """Listen to the backward pass that comes now, unless this step is sent uncompressed."""
        steps, config = self._compressor.steps, self._compressor.config
        self._reset(is_listening=bool(self._matrices) and steps >= config.start_powersgd_iter)

    @torch.no_grad()
    def take(self) -> list[Tensor] | None:
        """Return the mean P of each matrix of the plan, or None if it is yet to be computed.

        All processes of the group must call it.
        """
        if not self._is_listening:
            return None
        mean_p = self._wait_for_all() if self._buckets else None
        if mean_p is None:
            self._num_parts = self._arrived
            self._agree_on_buckets()
        self._reset(is_listening=False)
        return mean_p

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _reset(self, is_listening: bool) -> None:
        self._is_listening = is_listening
        self._arrived: Counter[int] = Counter()
        # A dictionary as an ordered set.
        self._complete: dict[int, None] = {}
        self._in_flight: list[tuple[Tensor, Work]] = []

    @torch.no_grad()
    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._is_listening:
            return
        self._arrived[index] += 1
        if self._buckets and self._arrived[index] < self._num_parts[index]:
            return
        # While the order is recorded, the last part of a gradient counts.
        self._complete.pop(index, None)
        self._complete[index] = None
        while len(self._in_flight) < len(self._buckets):
            bucket = self._buckets[len(self._in_flight)]
            if not self._complete.keys() >= set(bucket):
                break
            self._send(bucket)

    def _send(self, bucket: list[int]) -> None:
        group, statistics = self._compressor.group, self._compressor.communication
        flat = torch.cat([self._local_p(index).reshape(-1) for index in bucket]).div_(group.size())
        work = distributed.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        self._in_flight.append((flat, work))
        statistics.bytes_sent += 2 * (group.size() - 1) * flat.numel() * flat.element_size() // group.size()

    def _local_p(self, index: int) -> Tensor:
        gradient = self._parameters[index].grad
        return self._compressor.local_p(self._matrices[index], None if gradient is None else to_local(gradient))

    def _wait_for_all(self) -> list[Tensor]:
        for bucket in self._buckets[len(self._in_flight) :]:
            self._send(bucket)
        means: dict[int, Tensor] = {}
        for bucket, (flat, work) in zip(self._buckets, self._in_flight, strict=True):
            work.wait()
            parts = flat.split([self._num_elements(index) for index in bucket])
            for index, part in zip(bucket, parts, strict=True):
                means[index] = part.view(-1, self._matrices[index].rank)
        return [means[index] for index in self._matrices]

    def _num_elements(self, index: int) -> int:
        return self._matrices[index].rows * self._matrices[index].rank

    def _agree_on_buckets(self) -> None:
        never_came = (index for index in self._matrices if index not in self._complete)
        order = torch.tensor([*self._complete, *never_came], device=self._parameters[0].device)
        distributed.broadcast(order, group=self._compressor.group, group_src=0)
        self._buckets = self._split(order.tolist())

    def _split(self, order: list[int]) -> list[list[int]]:
        """Split into buckets of about equal size, in this order."""
        starts = [0, *accumulate(self._num_elements(index) for index in order)]
        bucket_of = {index: start * _BUCKETS // starts[-1] for index, start in zip(order, starts[:-1], strict=True)}
        return [list(indices) for _, indices in groupby(order, key=bucket_of.__getitem__)]
