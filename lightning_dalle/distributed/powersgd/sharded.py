"""Gradients of sharded parameters, averaged between machines."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dalle.distributed.powersgd.comm import WIRE_FORMATS, average_over_group
from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.overlap import EarlyFactors
from lightning_dalle.ops.finite import all_finite, to_local

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


class ShardedGradients:
    """The gradients of parameters that FSDP2 shards over one dimension of a mesh and the other dimension replicates.

    Inside a machine FSDP2 reduces gradients in each backward; between machines `synchronise` averages each shard with
    its peers of other machines by PowerSGD, once an update. Parameters that are not sharded are averaged over all
    processes, whole. Where a shard is all of it, on a mesh with shards of one process, parameters may be plain tensors,
    which spares FSDP2's copies.

    Between updates a compressed gradient takes one buffer, its residual, in which the next one accumulates. Only while
    an optimizer steps, when no activations are kept, does the mean gradient stand beside it, until its `release`.

    Args:
        parameters: Those that are trained, by name; the same on all processes.
        mesh: Of dimensions `replicate` and `shard`.
        excluded: Names of parameters whose gradients are not compressed.

    Attributes:
        sharded: Parameters that PowerSGD is in charge of, by name.
        norm: Of the last synchronised gradient, over all shards; infinite if it was rejected.
        skipped_steps: Rejected gradients.
        reconstruction_errors: By name, of the last synchronisation that looked for them.

    Raises:
        ValueError: If a parameter is sharded over something else than the mesh's dimension `shard`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        config: PowerSGDConfig,
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        shard_mesh = mesh["shard"]
        has_parts = shard_mesh.size() > 1
        self.sharded = {name: part for name, part in parameters.items() if isinstance(part, DTensor) or not has_parts}
        self._plain = [part for name, part in parameters.items() if name not in self.sharded]
        for name, parameter in self.sharded.items():
            if isinstance(parameter, DTensor) and not _is_over(parameter, shard_mesh):
                raise ValueError(
                    f"{name} is distributed over {parameter.device_mesh}, which must be the dimension 'shard' of "
                    "device_mesh: fully_shard(block, mesh=self.device_mesh['shard'])"
                )
        self.shard_group = shard_mesh.get_group()
        self.shard = shard_mesh.get_local_rank()
        self.compressor = PowerSGD(
            {name: to_local(parameter) for name, parameter in self.sharded.items()},
            config,
            mesh["replicate"].get_group(),
            excluded=excluded,
            shard=self.shard,
        )
        self._early = EarlyFactors(self.compressor, list(self.sharded.values())) if config.overlap else None
        self.norm = torch.zeros((), dtype=torch.float64)
        self.skipped_steps = 0
        self.reconstruction_errors: Mapping[str, float] = {}
        self._holds_residuals = False

    @torch.no_grad()
    def fold_residuals(self) -> None:
        """Let gradients accumulate on what past steps left out. To be called once or more before each backward."""
        for place, parameter in enumerate(self.sharded.values()):
            residual = self.compressor.residuals.take(place)
            if residual is None:
                continue
            if parameter.grad is None:
                parameter.grad = like_parameter(residual, parameter)
            else:
                to_local(parameter.grad).add_(residual)
        self._holds_residuals = True

    def begin_last_backward(self) -> None:
        """Tell that the next backward pass is the last one before `synchronise`."""
        if self._early is not None:
            self._early.begin()

    @torch.no_grad()
    def synchronise(self, measure: bool = False, keep_spoiled: bool = False) -> bool:
        """Replace each gradient by its mean over all processes; all of them must call it.

        If a gradient is not finite on any process, or the norm is not, all gradients are taken away on all processes,
        so that an optimizer leaves parameters and moments alone.

        Args:
            measure: Whether to look for `reconstruction_errors`.
            keep_spoiled: Leave gradients that are not finite where they are, for somebody who looks for them and skips
                the update.

        Returns:
            Whether there are gradients to step with.
        """
        self._holds_residuals = False
        gradients = [None if part.grad is None else to_local(part.grad) for part in self.sharded.values()]
        factors = None if self._early is None else self._early.take()
        reduction = self.compressor.reduce(gradients, measure, factors)
        squares = sum(self._gather_over_shards(reduction.squared_norm)) + average_plain_gradients(self._plain)
        self.norm = torch.as_tensor(squares).sqrt()
        if not bool(self.norm.isfinite()):
            self._reject(gradients, keep_spoiled)
            return False
        means = self.compressor.accept(reduction, gradients)
        for parameter, mean in zip(self.sharded.values(), means, strict=True):
            parameter.grad = None if mean is None else like_parameter(mean, parameter)
        self.reconstruction_errors = reduction.reconstruction_errors or self.reconstruction_errors
        return True

    def release(self) -> None:
        """Drop mean gradients beside which there is a residual, once an optimizer has stepped with them."""
        for place, parameter in enumerate(self.sharded.values()):
            if place in self.compressor.residuals:
                parameter.grad = None

    @torch.no_grad()
    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the synchronised gradient down to this norm, where it is larger."""
        coefficient = (max_norm / (self.norm + 1e-6)).clamp(max=1.0)
        for gradient in self._local_gradients():
            gradient.mul_(coefficient.to(gradient.dtype))

    @torch.no_grad()
    def clip_by_value(self, largest: float) -> None:
        """Clamp each entry of the synchronised gradient."""
        for gradient in self._local_gradients():
            gradient.clamp_(-largest, largest)

    def residual(self, place: int) -> Tensor | None:
        """What is left out at this moment, on this process; amid an accumulation, with the gradients so far."""
        if not self._holds_residuals:
            return self.compressor.residuals.peek(place)
        gradient = list(self.sharded.values())[place].grad
        return None if gradient is None else to_local(gradient)

    def close(self) -> None:
        """Leave the parameters as they were."""
        if self._early is not None:
            self._early.close()

    def _reject(self, gradients: Sequence[Tensor | None], keep_spoiled: bool) -> None:
        self.compressor.reject(gradients)
        self.skipped_steps += 1
        for parameter in (*self.sharded.values(), *self._plain):
            is_healthy = parameter.grad is None or all_finite([to_local(parameter.grad)])
            if is_healthy or not keep_spoiled:
                parameter.grad = None

    def _local_gradients(self) -> list[Tensor]:
        parameters = (*self.sharded.values(), *self._plain)
        return [to_local(part.grad) for part in parameters if part.grad is not None]

    def _gather_over_shards(self, value: Tensor) -> list[Tensor]:
        """The value of each shard; added in one order, so that no machine clips by another norm than the others."""
        if self.shard_group.size() == 1:
            return [value]
        values = [torch.empty_like(value) for _ in range(self.shard_group.size())]
        distributed.all_gather(values, value, group=self.shard_group)
        return values


def _is_over(parameter: DTensor, mesh: DeviceMesh) -> bool:
    return parameter.device_mesh.ndim == 1 and parameter.device_mesh.mesh.tolist() == mesh.mesh.tolist()


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of this process's part that is distributed as the parameter is."""
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
