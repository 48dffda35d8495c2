"""The benchmark of the video transformer at a toy size: that it runs, and compares the same numbers of tokens."""

from dataclasses import replace

from lightning_dalle.ops.rope import RotaryGridConfig
from tests.benchmarks.video_dit import SMALL, packing_table, step_table

ROTARY = RotaryGridConfig(original_max_position_embeddings=(8, 1, 2), axis_dims=(8, 4, 4))
CONFIG = replace(SMALL.config, depth=1, num_heads=1, head_dim=16, feed_forward_width=8, text_width=4, rotary=ROTARY)
TOY = replace(SMALL, config=CONFIG, rounds=1)


def test_step_table_has_a_row_for_each_network() -> None:
    table = step_table(TOY)
    assert [row[0] for row in table.rows] == ["ours", "diffusers"]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_half_of_what_is_padded_is_padding() -> None:
    assert [row[:2] for row in packing_table(TOY).rows] == [("packed", "32"), ("padded", "64")]
