"""The benchmark of sharded sequences at a toy size: that it runs, and that ranks give what one process does."""

from tests.benchmarks.context_sizes import Sizes
from tests.benchmarks.context_times import table_of


def test_every_mask_has_a_row_and_the_same_results() -> None:
    table = table_of(Sizes(length=256, heads=2, head_dim=8, rounds=1), world_size=2)
    masks = [row[0] for row in table.rows]
    assert masks == ["bidirectional", "causal", *(f"text prefix + {kind}" for kind in ("row", "column", "convolution"))]
    assert all(float(row[-1]) < 1e-5 for row in table.rows)
    # A rank keeps its half of what one process does.
    assert {row[-2] for row in table.rows} == {"0.50"}
