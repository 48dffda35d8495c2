"""Ways to attend over a sharded sequence, by the number of ranks that they are tried on."""

from functools import cache
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

ENGINES = {2: ["ring", "heads"], 3: ["ring", "heads"], 4: ["ring", "heads", "usp"]}


@cache
def groups(engine: str) -> dict[str, Any]:
    world = distributed.group.WORLD
    assert world is not None
    if engine != "usp":
        return {"ring_group" if engine == "ring" else "ulysses_group": world}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    return {"ring_group": mesh.get_group("ring"), "ulysses_group": mesh.get_group("heads")}
