"""Several optimizers that are stepped, scheduled and saved as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class JoinedOptimizer(Optimizer):
    """Optimizers of different parameters behind the face of one, which Lightning's automatic optimization asks for.

    Parameter groups are those of the parts, one after the other, and the very same mappings: a schedule of the whole
    reaches the parts. The state is shared as well.

    Args:
        optimizers: Each of parameters of its own, without state yet.

    Raises:
        ValueError: If there is none, two share a parameter, or one was stepped already.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4, bias=False))
        >>> parts = torch.optim.AdamW(network[0].parameters()), torch.optim.Muon(network[1].parameters())
        >>> [group["lr"] for group in JoinedOptimizer(*parts).param_groups]
        [0.001, 0.001]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("optimizers () is empty; give at least one")
        stepped = [type(optimizer).__name__ for optimizer in optimizers if optimizer.state]
        if stepped:
            raise ValueError(f"optimizers ({', '.join(stepped)}) were stepped already; join new ones")
        self.optimizers = optimizers
        # The base class refuses parameters that occur twice, and takes the groups as they are.
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state, as `load_state_dict` makes them anew, for the parts too."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parts, in their order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _share(self) -> None:
        start = 0
        for optimizer in self.optimizers:
            stop = start + len(optimizer.param_groups)
            # Through the part's own hook, which adds what older files lack.
            optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups[start:stop]})
            start = stop
