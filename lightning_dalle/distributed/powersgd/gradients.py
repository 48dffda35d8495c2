"""PowerSGD for the gradients of a module that FSDP2 shards, or that is replicated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.gradients import (
    average_gradients,
    distribute_like,
    spread_non_finite,
    squared_norm,
)
from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.overlap import OverlappedAllReduce
from lightning_dalle.ops.finite import to_local


class PowerSGDGradients:
    """Averages the gradients of a step over replicas by PowerSGD, once the shards of each replica were reduced.

    Within a replica FSDP2 reduces gradients in each backward pass; between replicas `synchronize` averages each shard
    with its peers, once a step. Parameters whose training begins later are averaged uncompressed. Where a replica has
    one process, parameters may be plain tensors, which spares FSDP2's copies.

    Memory of one compressed gradient, by the time within a step:

    | time | `parameter.grad` | error-feedback buffer |
    | --- | --- | --- |
    | before the first backward pass | none | what the last step missed |
    | during backward passes | accumulates on that buffer | the same memory |
    | from `synchronize` to the end of the optimizer's step | the mean | what this step missed |
    | after `release` | none | what this step missed |

    So the second buffer exists only while no activations are kept.

    Args:
        parameters: Trained parameters by name; the same on all processes.
        replicate_group: Processes that hold the same shard.
        shard_group: Processes that hold the shards of one replica.
        excluded: Names of parameters whose gradients are not compressed.
        keep_non_finite: Show gradients that are not finite to a precision plugin that looks for them and skips the
            step. Otherwise all gradients become None, so that an optimizer leaves parameters and moments alone.

    Attributes:
        parameters: Parameters of the compressor, by name; its plan leaves some of them uncompressed.
        norm: Norm of the last synchronized gradient over all shards; not finite if it was rejected.
        skipped_steps: Number of rejected gradients.
        measure: Whether to compute `reconstruction_errors` at the next synchronization.
        reconstruction_errors: By name, of the last synchronization that measured them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicate_group: ProcessGroup,
        shard_group: ProcessGroup,
        config: PowerSGDConfig,
        excluded: frozenset[str] = frozenset(),
        keep_non_finite: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.shard_group = shard_group
        self.compressor = PowerSGD(
            {name: to_local(parameter) for name, parameter in self.parameters.items()},
            config.per_shard(shard_group.size()),
            replicate_group,
            excluded=excluded,
            shard=shard_group.rank(),
        )
        self.norm = torch.zeros((), dtype=torch.float64)
        self.skipped_steps = 0
        self.measure = False
        self.reconstruction_errors: Mapping[str, float] = {}
        self._replicate_group = replicate_group
        self._keep_non_finite = keep_non_finite
        self._overlap = OverlappedAllReduce(self.compressor, [*self.parameters.values()]) if config.overlap else None
        self._late: list[nn.Parameter] = []
        self._accumulates = False

    @property
    def has_error_feedback(self) -> bool:
        """Whether gradients of one step enter the next, so that all must have the same scale."""
        return self.compressor.config.error_feedback and bool(self.compressor.plan.matrices)

    @torch.no_grad()
    def begin_backward(self) -> None:
        """Let gradients accumulate on the error-feedback buffers. Call it before each backward pass."""
        for index, parameter in enumerate(self.parameters.values()):
            error = self.compressor.error_feedback.take(index)
            if error is None:
                continue
            if parameter.grad is None:
                parameter.grad = distribute_like(error, parameter)
            else:
                to_local(parameter.grad).add_(error)
        self._accumulates = True

    def begin_last_backward(self) -> None:
        """Say that the next backward pass is the last one before `synchronize`."""
        if self._overlap is not None:
            self._overlap.begin()

    @torch.no_grad()
    def synchronize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient by its mean over all replicas; all processes must call it.

        If a gradient is not finite on any process, or the norm is not, the step is skipped on all.

        Args:
            parameters: Parameters that are trained now, which may be more than at first.
        """
        self._accumulates = False
        # 1. Exchange gradients between replicas; what began to train later is not compressed.
        gradients = self._local_gradients()
        mean_p = None if self._overlap is None else self._overlap.take()
        reduction = self.compressor.reduce(gradients, self.measure, mean_p)
        known = set(map(id, self.parameters.values()))
        self._late = [parameter for parameter in parameters.values() if id(parameter) not in known]
        average_gradients(self._late, self._replicate_group)
        # 2. Agree with the other shards of this replica whether to step.
        self.norm = self._sum_over_shards(reduction.squared_norm + squared_norm(self._late)).sqrt()
        if not bool(self.norm.isfinite()):
            self._reject(gradients)
            return
        # 3. Take the means; error feedback keeps what they miss.
        means = self.compressor.accept(reduction, gradients)
        for parameter, mean in zip(self.parameters.values(), means, strict=True):
            parameter.grad = None if mean is None else distribute_like(mean, parameter)
        self.reconstruction_errors = reduction.reconstruction_errors or self.reconstruction_errors

    def release(self) -> None:
        """Drop mean gradients that have an error-feedback buffer, once the optimizer has stepped with them."""
        for index, parameter in enumerate(self.parameters.values()):
            if index in self.compressor.error_feedback:
                parameter.grad = None

    def missed(self, index: int) -> Tensor | None:
        """Return what compression has missed so far on this process; amid accumulation, with the gradients so far."""
        return self._local_gradients()[index] if self._accumulates else self.compressor.error_feedback.peek(index)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._overlap is not None:
            self._overlap.close()

    def _reject(self, gradients: Sequence[Tensor | None]) -> None:
        self.compressor.reject(gradients)
        self.skipped_steps += 1
        parameters = [*self.parameters.values(), *self._late]
        if self._keep_non_finite:
            spread_non_finite(parameters)
            return
        for parameter in parameters:
            parameter.grad = None

    def _local_gradients(self) -> list[Tensor | None]:
        return [None if part.grad is None else to_local(part.grad) for part in self.parameters.values()]

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Add the values of all shards in one order: all replicas must come to the same bits."""
        if self.shard_group.size() == 1:
            return value
        values = [torch.empty_like(value) for _ in range(self.shard_group.size())]
        distributed.all_gather(values, value.contiguous(), group=self.shard_group)
        return torch.stack(values).sum()
