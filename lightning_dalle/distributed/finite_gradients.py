"""Whether gradients are finite, decided by all ranks together."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed

from lightning_dalle.ops.finite import finite_flag
from lightning_dalle.ops.local_part import local_part


def groups_finite_on_all_ranks(
    groups: Sequence[Iterable[Tensor]], device: torch.device, process_group: distributed.ProcessGroup | None = None
) -> list[bool]:
    """Return for each group of gradients whether all of them are finite on every rank, the same answer everywhere.

    One all-reduce of a flag per group over the process group, by default the whole world: all dimensions of a mesh
    must agree on a skipped update, those that shard or copy the gradient as well as those that reduce it. All ranks
    call it, with the same number of groups; a group may be empty. Of a DTensor each rank looks at its own part.

    Args:
        device: Where the flags travel, one that the process group's backend serves.
    """
    local = [finite_flag([local_part(gradient) for gradient in group], device) for group in groups]
    flags = torch.stack(local).to(torch.int32) if local else torch.ones(0, dtype=torch.int32, device=device)
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(flags, op=distributed.ReduceOp.MIN, group=process_group)
    return [bool(flag) for flag in flags.tolist()]
