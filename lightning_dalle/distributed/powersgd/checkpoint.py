"""The compressor's state through torch.distributed.checkpoint, for any later number of machines and shards."""

from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader

from lightning_dalle.distributed.powersgd.sharded import ShardedGradients, like_parameter
from lightning_dalle.ops.finite import to_local


@torch.no_grad()
def save_compressor(gradients: ShardedGradients, folder: Path) -> None:
    """Write residuals as their sums over machines, and factors that training changed; all processes must call it."""
    distributed_checkpoint.save(
        residual_sums(gradients) | _queries(gradients) | _steps(gradients), checkpoint_id=folder
    )


@torch.no_grad()
def load_compressor(gradients: ShardedGradients, folder: Path) -> list[str]:
    """Read what fits: residuals always, spread over however many machines there are; all processes must call it.

    Returns:
        Names of warm factors that belong to another sharding or rank and start again.
    """
    compressor = gradients.compressor
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    residuals = {
        f"residual.{name}": like_parameter(torch.zeros_like(to_local(parameter)), parameter)
        for name, parameter in gradients.sharded.items()
        if f"residual.{name}" in stored
    }
    queries = _queries(gradients)
    fitting = {
        key: query
        for key, query in queries.items()
        if key in stored and getattr(stored[key], "size", None) == query.shape
    }
    steps = _steps(gradients)
    distributed_checkpoint.load(residuals | fitting | steps, checkpoint_id=folder)
    compressor.steps = int(steps["steps"])
    for place, name in enumerate(gradients.sharded):
        if f"residual.{name}" in residuals:
            share = to_local(residuals[f"residual.{name}"]).div_(compressor.group.size())
            # Zeros stand for none, which leaves a parameter that nothing uses without a gradient.
            if share.any():
                compressor.residuals.keep(place, share)
    return sorted(key.split(".", 2)[2] for key in queries.keys() - fitting.keys())


@torch.no_grad()
def residual_sums(gradients: ShardedGradients) -> dict[str, Tensor]:
    """What all machines together left out, by name, sharded as the parameters; all processes must call it."""
    compressor = gradients.compressor
    if not compressor.config.error_feedback:
        return {}
    compressed = {matrix.place for matrix in compressor.plan.matrices}
    sums: dict[str, Tensor] = {}
    for place, (name, parameter) in enumerate(gradients.sharded.items()):
        residual = gradients.residual(place)
        # Those of uncompressed tensors come from a checkpoint, and so are on all processes.
        if place not in compressed and residual is None:
            continue
        total = torch.zeros_like(to_local(parameter)) if residual is None else residual.clone()
        if compressor.group.size() > 1:
            distributed.all_reduce(total, group=compressor.group)
        sums[f"residual.{name}"] = like_parameter(total, parameter)
    return sums


def _queries(gradients: ShardedGradients) -> dict[str, Tensor]:
    """Warm factors of this process's shard; fixed ones are drawn again."""
    compressor = gradients.compressor
    if not compressor.config.warm_start:
        return {}
    shard = f"{gradients.shard}of{gradients.shard_group.size()}"
    return {f"query.{shard}.{name}": query for name, query in compressor.queries.items()}


def _steps(gradients: ShardedGradients) -> dict[str, Tensor]:
    return {"steps": torch.tensor(gradients.compressor.steps)}
