"""The processes that hold the parts of one sequence."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class ContextGroups:
    """The group of all of them, and how it is laid out for attention; nothing is a process alone.

    Attributes:
        context: All processes, rank `r * heads.size() + h` of which is rank r of its ring and h of its head group.
    """

    context: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    heads: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many parts there are."""
        return 1 if self.context is None else self.context.size()

    @property
    def rank(self) -> int:
        """Which part this process holds."""
        return 0 if self.context is None else self.context.rank()

    @property
    def head_size(self) -> int:
        """Among how many processes heads are divided."""
        return 1 if self.heads is None else self.heads.size()


def init_context_groups(world_size: int, context_size: int, head_size: int, device_type: str) -> ContextGroups:
    """Neighbouring ranks of the world share sequences; all processes must call it.

    Args:
        context_size: Must divide `world_size`.
        head_size: Neighbours that trade positions for heads; must divide `context_size`. The rest is rings.
    """
    if context_size == 1:
        return ContextGroups()
    shape = (world_size // context_size, context_size // head_size, head_size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "ring", "heads"))
    joined = init_device_mesh(device_type, (shape[0], context_size), mesh_dim_names=("data", "context"))
    return ContextGroups(
        joined.get_group("context"),
        mesh.get_group("ring") if shape[1] > 1 else None,
        mesh.get_group("heads") if head_size > 1 else None,
    )
