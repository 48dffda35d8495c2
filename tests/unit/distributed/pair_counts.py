"""How often planned tiles show each pair of positions."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.schedule import PlannedTiles


def as_positions(runs: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def add_counts(counts: Tensor, planned: Iterable[PlannedTiles], queries: Tensor, keys: Tensor) -> None:
    """Adds to [positions, positions] what tiles show between tensors that hold queries and keys at these positions."""
    for tiles in planned:
        rows = tiles.of_queries(queries.view(1, 1, -1, 1))
        columns = tiles.of_keys(keys.view(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1))[0].mT
        # Dropout takes positions from the plan, not from the tensors.
        assert torch.equal(tiles.positions(queries.device)[0], rows)
        assert torch.equal(tiles.positions(queries.device)[1], columns)
        shown = torch.ones(1, 1, rows.shape[-2], columns.shape[-1], dtype=torch.bool)
        if tiles.hidden is not None:
            shown = ~tiles.hidden
            assert shown.any(-1).all()
        if tiles.causal:
            shown = shown.tril()
        rows, columns, shown = torch.broadcast_tensors(rows, columns, shown.int())
        counts.index_put_((rows, columns), shown, accumulate=True)
