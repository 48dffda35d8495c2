"""How often the tiles of a schedule show each pair of positions."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dalle.ops.attention.schedule import Tiles


def as_positions(runs: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def shown_pairs(tiles: Tiles) -> Tensor:
    """[batch or 1, queries, keys]."""
    shown = torch.ones(1, tiles.num_queries, tiles.num_keys, dtype=torch.bool)
    if tiles.masked is not None:
        shown = ~tiles.masked[:, 0]
    return shown.tril() if tiles.causal else shown


def add_counts(counts: Tensor, schedule: Iterable[Tiles], queries: Tensor, keys: Tensor) -> None:
    """Adds to [positions, positions] what tiles show between tensors that hold queries and keys at these positions."""
    for tiles in schedule:
        rows = tiles.queries(queries.view(1, 1, -1, 1))
        columns = tiles.keys(keys.view(1, 1, -1, 1)).mT
        # Dropout takes positions from the schedule, not from the tensors.
        assert torch.equal(tiles.positions(queries.device)[0], rows)
        assert torch.equal(tiles.positions(queries.device)[1].expand_as(columns), columns)
        shown = shown_pairs(tiles)
        assert shown.any(-1).all()
        rows, columns, shown = torch.broadcast_tensors(rows, columns, shown.int())
        counts.index_put_((rows, columns), shown, accumulate=True)
