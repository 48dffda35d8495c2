"""The benchmarks at a toy size: that they run, and that what they compare gives the same."""

from lightning_dalle.models.sparse_transformer import SparseTransformerConfig
from tests.benchmarks.attention_tables import AttentionSizes, growth_table, layer_table
from tests.benchmarks.network_tables import NetworkSizes, decoding_table, step_table

ATTENTION = AttentionSizes(text_length=5, batch=1, num_heads=1, head_dim=4, grids=(4,), growth=(4, 8), rounds=1)
NETWORK = NetworkSizes(
    SparseTransformerConfig(
        depth=4,
        num_heads=1,
        head_dim=8,
        text_tokens=4,
        text_vocabulary_size=9,
        grid_height=4,
        grid_width=4,
        image_vocabulary_size=11,
    ),
    grids=(4,),
    num_candidates=3,
    stretches=2,
    rounds=1,
    step_rounds=1,
)


def test_attention_tables_have_a_row_for_each_pattern() -> None:
    layer, growth = layer_table(ATTENTION), growth_table(ATTENTION)
    assert [row[1] for row in layer.rows] == ["row", "column", "convolution"]
    assert len(growth.rows) == 7
    assert all(len(row) == len(table.columns) for table in (layer, growth) for row in table.rows)


def test_step_table_has_a_row_for_each_grid() -> None:
    assert [row[0] for row in step_table(NETWORK).rows] == ["4x4"]


def test_every_way_of_decoding_draws_the_same_tokens() -> None:
    table = decoding_table(NETWORK)
    assert [row[-1] for row in table.rows] == ["", "48 of 48", "6 of 6"]
    assert "| ours | " in table.markdown()
