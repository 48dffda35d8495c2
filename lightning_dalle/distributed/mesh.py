"""Process groups of a run over the axes replicate, shard and context."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dalle.distributed.context_parallel.comm import ContextGroups, init_context_groups

_ADVICE = "change it, or devices and num_nodes of the Trainer"


@dataclass(frozen=True)
class MeshSizes:
    """Numbers of processes along the axes of a mesh, all of which fit each other.

    Args:
        world: Number of all processes.
        replica: Number of processes that share one replica of the parameters; 1 where nothing is sharded.
        context: Number of processes that share each sequence.

    Raises:
        ValueError: If a number does not divide the one that it must divide.

    Example:
        >>> MeshSizes(world=8, replica=4, context=2).shape
        (2, 2, 2)
    """

    world: int
    replica: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if self.world % self.context:
            raise ValueError(
                f"context_parallel_degree ({self.context}) must divide the number of processes ({self.world}); "
                f"{_ADVICE}"
            )
        if self.world % self.replica:
            raise ValueError(
                f"shard_size ({self.replica}) must divide the number of processes ({self.world}); {_ADVICE}"
            )

    @classmethod
    def sharded(cls, world: int, shard_size: int, context: int) -> "MeshSizes":
        """Return the sizes of a run whose parameters are sharded, also over the processes that share a sequence.

        Raises:
            ValueError: If a number does not divide the one that it must divide.
        """
        sizes = cls(world, shard_size, context)
        if shard_size % context:
            raise ValueError(
                f"shard_size ({shard_size}) must be a multiple of context_parallel_degree ({context}), whose processes "
                "share parameters too; change one of them, or leave shard_size out"
            )
        return sizes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the axes replicate, shard and context."""
        return self.world // max(self.replica, self.context), max(self.replica // self.context, 1), self.context


@dataclass(frozen=True)
class ProcessMesh:
    """Process groups of a run. Neighbouring ranks share a sequence; then they share a replica of the parameters.

    Eight processes, four of which share a replica and two of which share a sequence:

        rank       0 1 2 3 4 5 6 7
        replicate  0 0 0 0 1 1 1 1
        shard      0 0 1 1 0 0 1 1
        context    0 1 0 1 0 1 0 1

    Parameters are sharded over both inner axes, 0 1 2 3 and 4 5 6 7, as the processes of a sequence have the same ones.

    Attributes:
        device_mesh: Mesh of the three axes, as Lightning shows it to a module.
        shard_mesh: Mesh of one dimension, of the processes that share one replica of the parameters.
        replicate_group: Processes that hold the same shard of the parameters; all, where nothing is sharded.
        context_groups: Groups of the processes that share a sequence.
    """

    device_mesh: DeviceMesh
    shard_mesh: DeviceMesh
    replicate_group: ProcessGroup
    context_groups: ContextGroups

    @classmethod
    def init(cls, sizes: MeshSizes, ulysses_degree: int, device_type: str) -> "ProcessMesh":
        """Make the process groups; all processes must call it.

        Args:
            ulysses_degree: Number of neighbours in a sequence's group among which attention divides heads.
        """
        device_mesh = init_device_mesh(device_type, sizes.shape, mesh_dim_names=("replicate", "shard", "context"))
        by_replica = init_device_mesh(
            device_type, (sizes.world // sizes.replica, sizes.replica), mesh_dim_names=("replicate", "shard")
        )
        context_groups = init_context_groups(sizes.world, sizes.context, ulysses_degree, device_type)
        return cls(device_mesh, by_replica["shard"], by_replica["replicate"].get_group(), context_groups)
