"""PowerSGD for the gradients of a module that FSDP2 shards, or that is replicated."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_dalle.distributed.gradients import (
    average_gradients,
    distribute_like,
    local_gradients,
    scale_to_norm,
)
from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.overlap import OverlappedAllReduce
from lightning_dalle.ops.finite import all_finite, to_local


class PowerSGDGradients:
    """Averages the gradients of a step over replicas by PowerSGD, once the shards of each replica were reduced.

    Within a replica FSDP2 reduces gradients in each backward pass; between replicas `synchronize` averages each shard
    with its peers, once a step. Parameters that are not sharded though others are, and parameters whose training begins
    later, are averaged uncompressed. Where a replica has one process, parameters may be plain tensors, which spares
    FSDP2's copies.

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

    Attributes:
        compressed: Parameters that PowerSGD takes care of, by name; the plan may still leave some uncompressed.
        norm: Norm of the last synchronized gradient over all shards; infinite if it was rejected.
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
    ) -> None:
        has_shards = shard_group.size() > 1
        self.compressed = {
            name: parameter
            for name, parameter in parameters.items()
            if isinstance(parameter, DTensor) or not has_shards
        }
        self._others = [parameter for name, parameter in parameters.items() if name not in self.compressed]
        self._replicate_group, self.shard_group = replicate_group, shard_group
        self.compressor = PowerSGD(
            {name: to_local(parameter) for name, parameter in self.compressed.items()},
            config.per_shard(shard_group.size()),
            replicate_group,
            excluded=excluded,
            shard=shard_group.rank(),
        )
        self._overlap = OverlappedAllReduce(self.compressor, [*self.compressed.values()]) if config.overlap else None
        self.norm = torch.zeros((), dtype=torch.float64)
        self.skipped_steps = 0
        self.measure = False
        self.reconstruction_errors: Mapping[str, float] = {}
        self._accumulates = False

    @property
    def has_error_feedback(self) -> bool:
        """Whether gradients of one step enter the next, so that all must have the same scale."""
        return self.compressor.config.error_feedback

    @torch.no_grad()
    def begin_backward(self) -> None:
        """Let gradients accumulate on the error-feedback buffers. Call it before each backward pass."""
        for index, parameter in enumerate(self.compressed.values()):
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
    def synchronize(self, parameters: Mapping[str, nn.Parameter], keep_non_finite: bool = False) -> bool:
        """Replace each gradient by its mean over all processes; all of them must call it.

        If a gradient is not finite on any process, or the norm is not, all gradients are set to None on all processes,
        so that an optimizer leaves parameters and moments alone.

        Args:
            parameters: Parameters that are trained now. Those that were not when this object was made are averaged
                uncompressed.
            keep_non_finite: Leave gradients that are not finite where they are, for a precision plugin that looks for
                them and skips the step.

        Returns:
            Whether there are gradients to step with.
        """
        self._adopt(parameters)
        self._accumulates = False
        gradients = [
            None if parameter.grad is None else to_local(parameter.grad) for parameter in self.compressed.values()
        ]
        mean_p = None if self._overlap is None else self._overlap.take()
        reduction = self.compressor.reduce(gradients, self.measure, mean_p)
        squares = sum(self._gather_over_shards(reduction.squared_norm))
        self.norm = (squares + average_gradients(self._others, self._replicate_group, self.shard_group)).sqrt()
        if not bool(self.norm.isfinite()):
            self._reject(gradients, keep_non_finite)
            return False
        means = self.compressor.accept(reduction, gradients)
        for parameter, mean in zip(self.compressed.values(), means, strict=True):
            parameter.grad = None if mean is None else distribute_like(mean, parameter)
        self.reconstruction_errors = reduction.reconstruction_errors or self.reconstruction_errors
        return True

    def release(self) -> None:
        """Drop mean gradients that have an error-feedback buffer, once the optimizer has stepped with them."""
        for index, parameter in enumerate(self.compressed.values()):
            if index in self.compressor.error_feedback:
                parameter.grad = None

    @torch.no_grad()
    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the synchronized gradient down to this norm, where it is larger."""
        scale_to_norm(self._local_gradients(), self.norm, max_norm)

    @torch.no_grad()
    def clip_by_value(self, largest: float) -> None:
        """Clamp each entry of the synchronized gradient."""
        for gradient in self._local_gradients():
            gradient.clamp_(-largest, largest)

    def missed(self, index: int) -> Tensor | None:
        """Return what compression has missed so far on this process; amid accumulation, with the gradients so far."""
        if not self._accumulates:
            return self.compressor.error_feedback.peek(index)
        gradient = list(self.compressed.values())[index].grad
        return None if gradient is None else to_local(gradient)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._overlap is not None:
            self._overlap.close()

    def _adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take care of parameters whose training began after this object was made."""
        known = set(map(id, chain(self.compressed.values(), self._others)))
        self._others += [parameter for parameter in parameters.values() if id(parameter) not in known]

    def _reject(self, gradients: Sequence[Tensor | None], keep_non_finite: bool) -> None:
        self.compressor.reject(gradients)
        self.skipped_steps += 1
        for parameter in (*self.compressed.values(), *self._others):
            is_finite = parameter.grad is None or all_finite([to_local(parameter.grad)])
            if is_finite or not keep_non_finite:
                parameter.grad = None

    def _local_gradients(self) -> list[Tensor]:
        return local_gradients([*self.compressed.values(), *self._others])

    def _gather_over_shards(self, value: Tensor) -> list[Tensor]:
        """Gather the value of each shard, to be added in one order: all replicas must clip by the same norm."""
        if self.shard_group.size() == 1:
            return [value]
        values = [torch.empty_like(value) for _ in range(self.shard_group.size())]
        distributed.all_gather(values, value, group=self.shard_group)
        return values
