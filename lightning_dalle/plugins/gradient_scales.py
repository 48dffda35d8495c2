"""How the gradient scale of each residual block moves (Ramesh et al. 2021, appendix D)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_dalle.ops.finite import finite_flag, to_local


def groups_finite_on_all_ranks(
    groups: Sequence[Iterable[Tensor]], device: torch.device, process_group: distributed.ProcessGroup | None = None
) -> list[bool]:
    """Return for each group of gradients whether all of them are finite on every rank, the same answer everywhere.

    One all-reduce of a flag per group over the process group, by default the whole world: all dimensions of a mesh
    must agree on a skipped update, those that shard or copy the gradient as well as those that reduce it. All ranks
    call it, with the same number of groups; a group may be empty. Of a DTensor each rank looks at its local shard.

    Args:
        device: Where the flags travel, one that the process group's backend serves.
    """
    local = [finite_flag([to_local(gradient) for gradient in group], device) for group in groups]
    flags = torch.stack(local).to(torch.int32) if local else torch.ones(0, dtype=torch.int32, device=device)
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(flags, op=distributed.ReduceOp.MIN, group=process_group)
    return [bool(flag) for flag in flags.tolist()]


class GradientScales:
    """One scale per block, moved once per optimizer update by whether that block's parameter gradients were finite.

    A finite block's scale grows a little; a non-finite one's is divided, unless it was divided less than
    `backoff_interval` updates ago. Blocks do not touch each other. Skipped updates count as updates.

    Args:
        names: Names of the blocks.
        num_replicas: Data-parallel replicas; the three scales below are multiplied by it.
        growth_factor: Growth factor of the scale at each update whose gradients in the block are all finite.
        backoff_factor: Divides the scale where they are not.
        backoff_interval: Updates from one division of a scale to the next one at least.

    Attributes:
        scales: By block.
        num_growths: By block.
        num_divisions: By block.

    Raises:
        ValueError: If a constant is out of range.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_replicas: int = 1,
        initial_scale: float = 2.0**13,
        growth_factor: float = 2.0 ** (1 / 1000),
        backoff_factor: float = math.sqrt(2),
        backoff_interval: int = 125,
        min_scale: float = 2.0**7,
        max_scale: float = 2.0**24,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale < math.inf:
            raise ValueError(
                f"min_scale ({min_scale}), initial_scale ({initial_scale}) and max_scale ({max_scale}) must be "
                "positive and in this order"
            )
        if growth_factor < 1 or backoff_factor < 1:
            raise ValueError(
                f"growth_factor ({growth_factor}) and backoff_factor ({backoff_factor}) must be at least 1; "
                "1 keeps the scale"
            )
        if backoff_interval < 1 or num_replicas < 1:
            raise ValueError(
                f"backoff_interval ({backoff_interval}) and num_replicas ({num_replicas}) must be at least 1"
            )
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.backoff_interval = backoff_interval
        self.min_scale, self.max_scale = num_replicas * min_scale, num_replicas * max_scale
        self.scales = dict.fromkeys(names, num_replicas * initial_scale)
        self.num_growths = dict.fromkeys(names, 0)
        self.num_divisions = dict.fromkeys(names, 0)
        self._updates_since_division = dict.fromkeys(names, backoff_interval)

    def update(self, finite: Mapping[str, bool]) -> None:
        """Move the scales of the named blocks, after an update or after one that was skipped."""
        for name, is_finite in finite.items():
            self._updates_since_division[name] += 1
            if is_finite:
                self.num_growths[name] += 1
                self._set(name, self.scales[name] * self.growth_factor)
            elif self._updates_since_division[name] >= self.backoff_interval:
                self.num_divisions[name] += 1
                self._updates_since_division[name] = 0
                self._set(name, self.scales[name] / self.backoff_factor)

    def _set(self, name: str, scale: float) -> None:
        self.scales[name] = min(max(scale, self.min_scale), self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Scales and their history, by block."""
        return {
            "scales": dict(self.scales),
            "num_growths": dict(self.num_growths),
            "num_divisions": dict(self.num_divisions),
            "updates_since_division": dict(self._updates_since_division),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up scales and history.

        Raises:
            ValueError: If they are of other blocks.
        """
        if set(state["scales"]) != set(self.scales):
            missing, unknown = set(self.scales) - set(state["scales"]), set(state["scales"]) - set(self.scales)
            raise ValueError(
                f"the checkpoint's gradient scales lack the blocks {sorted(missing)} and have unknown ones "
                f"{sorted(unknown)}; name the blocks as in the run that wrote it"
            )
        self.scales = {name: state["scales"][name] for name in self.scales}
        self.num_growths = {name: state["num_growths"][name] for name in self.scales}
        self.num_divisions = {name: state["num_divisions"][name] for name in self.scales}
        self._updates_since_division = {name: state["updates_since_division"][name] for name in self.scales}
