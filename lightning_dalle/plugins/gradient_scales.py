"""How the gradient scale of each residual block moves (Ramesh et al. 2021, appendix D)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class GradientScales:
    """One scale per block, moved once per optimizer update by whether that block's parameter gradients were finite.

    A finite block's scale grows a little; a non-finite one's is divided, unless it was divided less than
    `division_window` updates ago. Blocks do not touch each other. Skipped updates count as updates.

    Args:
        names: Of the blocks.
        num_replicas: Data-parallel replicas; the three scales below are multiplied by it.
        growth_factor: Of the scale at each update whose gradients in the block are all finite.
        division_factor: Divides the scale where they are not.
        division_window: Updates from one division of a scale to the next one at least.

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
        division_factor: float = math.sqrt(2),
        division_window: int = 125,
        min_scale: float = 2.0**7,
        max_scale: float = 2.0**24,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale < math.inf:
            raise ValueError(
                f"min_scale ({min_scale}), initial_scale ({initial_scale}) and max_scale ({max_scale}) must be "
                "positive and in this order"
            )
        if growth_factor < 1 or division_factor < 1:
            raise ValueError(
                f"growth_factor ({growth_factor}) and division_factor ({division_factor}) must be at least 1; "
                "1 keeps the scale"
            )
        if division_window < 1 or num_replicas < 1:
            raise ValueError(
                f"division_window ({division_window}) and num_replicas ({num_replicas}) must be at least 1"
            )
        self.growth_factor, self.division_factor = growth_factor, division_factor
        self.division_window = division_window
        self.min_scale, self.max_scale = num_replicas * min_scale, num_replicas * max_scale
        self.scales = dict.fromkeys(names, num_replicas * initial_scale)
        self.num_growths = dict.fromkeys(names, 0)
        self.num_divisions = dict.fromkeys(names, 0)
        self._updates_since_division = dict.fromkeys(names, division_window)

    def update(self, finite: Mapping[str, bool]) -> None:
        """Move the scales of the named blocks, after an update or after one that was skipped."""
        for name, is_finite in finite.items():
            self._updates_since_division[name] += 1
            if is_finite:
                self.num_growths[name] += 1
                self._set(name, self.scales[name] * self.growth_factor)
            elif self._updates_since_division[name] >= self.division_window:
                self.num_divisions[name] += 1
                self._updates_since_division[name] = 0
                self._set(name, self.scales[name] / self.division_factor)

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
