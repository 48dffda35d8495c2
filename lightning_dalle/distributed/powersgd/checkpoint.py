"""State of PowerSGD through torch.distributed.checkpoint, for any later number of replicas and shards."""

from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader

from lightning_dalle.distributed.gradients import distribute_like
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.ops.finite import to_local


@torch.no_grad()
def save_powersgd(gradients: PowerSGDGradients, folder: Path) -> None:
    """Write the sums of error-feedback buffers, and Q if training changed it; all processes must call it."""
    state = error_feedback_sums(gradients) | _warm_q(gradients) | _steps(gradients)
    distributed_checkpoint.save(state, checkpoint_id=folder)


@torch.no_grad()
def load_powersgd(gradients: PowerSGDGradients, folder: Path) -> list[str]:
    """Read what fits: error-feedback buffers always, spread over the present replicas; all processes must call it.

    Returns:
        Names of parameters whose warm Q belongs to another sharding or rank and starts again.
    """
    compressor = gradients.compressor
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    sums = {
        f"error_feedback.{name}": distribute_like(torch.zeros_like(to_local(parameter)), parameter)
        for name, parameter in gradients.parameters.items()
        if f"error_feedback.{name}" in stored
    }
    warm_q = _warm_q(gradients)
    fitting = {key: q for key, q in warm_q.items() if getattr(stored.get(key), "size", None) == q.shape}
    steps = _steps(gradients)
    distributed_checkpoint.load(sums | fitting | steps, checkpoint_id=folder)
    compressor.steps = int(steps["steps"])
    for index, name in enumerate(gradients.parameters):
        if f"error_feedback.{name}" in sums:
            share = to_local(sums[f"error_feedback.{name}"]).div_(compressor.group.size())
            # Zeros stand for none, which leaves a parameter that nothing uses without a gradient.
            if share.any():
                compressor.error_feedback.keep(index, share)
    return sorted(key.split(".", 2)[2] for key in warm_q.keys() - fitting.keys())


@torch.no_grad()
def error_feedback_sums(gradients: PowerSGDGradients) -> dict[str, Tensor]:
    """Return what all replicas together have missed, by name, sharded as the parameters; all processes must call it."""
    compressor = gradients.compressor
    if not compressor.config.error_feedback:
        return {}
    in_plan = {matrix.index for matrix in compressor.plan.matrices}
    sums: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(gradients.parameters.items()):
        error = gradients.missed(index)
        # Buffers of uncompressed tensors come from a checkpoint, and so are on all processes.
        if index not in in_plan and error is None:
            continue
        total = torch.zeros_like(to_local(parameter)) if error is None else error.clone()
        if compressor.group.size() > 1:
            distributed.all_reduce(total, group=compressor.group)
        sums[f"error_feedback.{name}"] = distribute_like(total, parameter)
    return sums


def _warm_q(gradients: PowerSGDGradients) -> dict[str, Tensor]:
    """Return Q of this process's shard where training changed it; a random one is drawn again."""
    compressor = gradients.compressor
    if not compressor.config.warm_start:
        return {}
    shard = f"{gradients.shard_group.rank()}of{gradients.shard_group.size()}"
    return {f"q.{shard}.{name}": q for name, q in compressor.initial_q.items()}


def _steps(gradients: PowerSGDGradients) -> dict[str, Tensor]:
    return {"steps": torch.tensor(gradients.compressor.steps)}
