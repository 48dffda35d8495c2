from typing import Any

import pytest

from lightning_dalle.distributed.mesh import MeshSizes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (MeshSizes(8), (8, 1, 1)),
        (MeshSizes(8, context=2), (4, 1, 2)),
        (MeshSizes.sharded(8, shard_size=4, context=1), (2, 4, 1)),
        (MeshSizes.sharded(8, shard_size=4, context=2), (2, 2, 2)),
        (MeshSizes.sharded(8, shard_size=8, context=8), (1, 1, 8)),
    ],
)
def test_shape_holds_every_process_once(sizes: MeshSizes, shape: tuple[int, int, int]) -> None:
    assert sizes.shape == shape


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        ({"shard_size": 3, "context": 1}, r"shard_size \(3\) must divide the number of processes \(8\)"),
        ({"shard_size": 8, "context": 3}, r"context_parallel_degree \(3\) must divide the number of processes \(8\)"),
        ({"shard_size": 2, "context": 4}, r"shard_size \(2\) must be a multiple of context_parallel_degree \(4\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        MeshSizes.sharded(8, **sizes)
