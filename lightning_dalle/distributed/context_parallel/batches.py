"""What the processes of a context group must have in common before they share a sequence."""

import hashlib
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves


def check_batches_agree(batch: Any, group: ProcessGroup, device: torch.device) -> None:
    """Refuses batches that differ within the group; all processes of the world must call it.

    Raises:
        ValueError: On all processes, if they differ in any group.
    """
    digest = torch.tensor([_digest(batch)], dtype=torch.int64, device=device)
    extremes = torch.cat([digest, -digest])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=group)
    differs = (extremes[0] != -extremes[1]).to(torch.int64)
    distributed.all_reduce(differs, op=distributed.ReduceOp.MAX)
    if differs:
        raise ValueError(
            "the processes of a context group got different batches, but share one sequence; draw augmentations by "
            "sample instead of by rank or worker, and samplers by trainer.distributed_sampler_kwargs"
        )


def align_generators(group: ProcessGroup, device: torch.device) -> None:
    """Gives torch's generators of all processes of the group the state of its first."""
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device=device)
    state = torch.get_rng_state().to(device)
    for tensor in (seed, state):
        distributed.broadcast(tensor, group=group, group_src=0)
    if device.type == "cuda":
        # Its own state has another form; a fresh one of the same seed serves as well.
        torch.cuda.manual_seed(int(seed))
    torch.set_rng_state(state.cpu())


def _digest(batch: Any) -> int:
    """A hash of all tensors, numbers and texts."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr(tuple(leaf.shape)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, bool | int | float | str | bytes):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") >> 1
