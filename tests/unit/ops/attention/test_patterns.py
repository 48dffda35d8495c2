"""Attention patterns against tables written out by hand, and against their definition position by position."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.unit.ops.attention.oracle import DECODABLE_KINDS

# 6 text positions, then a 4 x 4 grid in raster order, one group of digits per grid row. Rows are queries.
TEXT_QUERIES = """
100000 0000 0000 0000 0000
110000 0000 0000 0000 0000
111000 0000 0000 0000 0000
111100 0000 0000 0000 0000
111110 0000 0000 0000 0000
111111 0000 0000 0000 0000
"""
# Itself and the four positions before it, across row ends.
ROW_QUERIES = """
111111 1000 0000 0000 0000
111111 1100 0000 0000 0000
111111 1110 0000 0000 0000
111111 1111 0000 0000 0000
111111 1111 1000 0000 0000
111111 0111 1100 0000 0000
111111 0011 1110 0000 0000
111111 0001 1111 0000 0000
111111 0000 1111 1000 0000
111111 0000 0111 1100 0000
111111 0000 0011 1110 0000
111111 0000 0001 1111 0000
111111 0000 0000 1111 1000
111111 0000 0000 0111 1100
111111 0000 0000 0011 1110
111111 0000 0000 0001 1111
"""
COLUMN_QUERIES = """
111111 1000 0000 0000 0000
111111 0100 0000 0000 0000
111111 0010 0000 0000 0000
111111 0001 0000 0000 0000
111111 1000 1000 0000 0000
111111 0100 0100 0000 0000
111111 0010 0010 0000 0000
111111 0001 0001 0000 0000
111111 1000 1000 1000 0000
111111 0100 0100 0100 0000
111111 0010 0010 0010 0000
111111 0001 0001 0001 0000
111111 1000 1000 1000 1000
111111 0100 0100 0100 0100
111111 0010 0010 0010 0010
111111 0001 0001 0001 0001
"""
# 3 x 3: the three positions around the one above, the left neighbour and itself; the window wraps in raster order.
CONVOLUTION_QUERIES = """
111111 1000 0000 0000 0000
111111 1100 0000 0000 0000
111111 0110 0000 0000 0000
111111 1011 0000 0000 0000
111111 1101 1000 0000 0000
111111 1110 1100 0000 0000
111111 0111 0110 0000 0000
111111 0011 1011 0000 0000
111111 0001 1101 1000 0000
111111 0000 1110 1100 0000
111111 0000 0111 0110 0000
111111 0000 0011 1011 0000
111111 0000 0001 1101 1000
111111 0000 0000 1110 1100
111111 0000 0000 0111 0110
111111 0000 0000 0011 1011
"""
TABLES: dict[PatternKind, str] = {"row": ROW_QUERIES, "column": COLUMN_QUERIES, "convolution": CONVOLUTION_QUERIES}


def _parse(table: str) -> torch.Tensor:
    return torch.tensor([[digit == "1" for digit in line.replace(" ", "")] for line in table.split("\n") if line])


@pytest.mark.parametrize("kind", TABLES)
def test_mask_equals_the_table_written_by_hand(kind: PatternKind) -> None:
    expected = _parse(TEXT_QUERIES + TABLES[kind])
    assert torch.equal(AttentionPattern(kind, 6, 4, 4, 3).mask(), expected)


def test_causal_and_full_masks() -> None:
    ones = torch.ones(22, 22, dtype=torch.bool)
    assert torch.equal(AttentionPattern("causal", 6, 4, 4).mask(), ones.tril())
    assert torch.equal(AttentionPattern("full", 6, 4, 4).mask(), ones)


def test_key_counts_are_those_of_the_paper_at_its_size() -> None:
    image_keys = {kind: AttentionPattern(kind, 256, 32, 32).mask()[256:, 256:].sum(1) for kind in TABLES}
    assert image_keys["row"].max() == 33
    assert image_keys["column"].max() == 32
    assert image_keys["convolution"].max() == 61
    assert round(image_keys["convolution"].double().mean().item(), 1) == 55.8


def _sees(kind: PatternKind, query: int, key: int, width: int, kernel_size: int) -> bool:
    """The definition once more, position by position."""
    if kind == "row":
        return query - key in range(width + 1)
    if kind == "column":
        return key % width == query % width and key <= query
    reach = range(-(kernel_size // 2), kernel_size // 2 + 1)
    return key <= query and any(query - key == rows * width + columns for rows in reach for columns in reach)


@given(
    kind=st.sampled_from(("row", "column", "convolution")),
    text_length=st.integers(1, 4),
    height=st.integers(0, 5),
    width=st.integers(1, 5),
    kernel_size=st.sampled_from((1, 3, 5, 11)),
)
@settings(max_examples=60, deadline=None)
def test_mask_holds_for_any_geometry(
    kind: PatternKind, text_length: int, height: int, width: int, kernel_size: int
) -> None:
    pattern = AttentionPattern(kind, text_length, height, width, kernel_size)
    mask = pattern.mask()
    for query in range(pattern.length):
        expected = [
            key <= query
            if key < text_length
            else query >= text_length and _sees(kind, query - text_length, key - text_length, width, kernel_size)
            for key in range(pattern.length)
        ]
        assert mask[query].tolist() == expected


@pytest.mark.parametrize("kind", DECODABLE_KINDS)
def test_fewer_rows_have_the_top_left_part_of_the_mask(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 6, 4, 4, 3)
    prefix = pattern.with_height(2)
    assert torch.equal(prefix.mask(), pattern.mask()[: prefix.length, : prefix.length])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("diagonal", 6, 4, 4), r"kind \('diagonal'\) must be one of row, column"),
        (("row", 0, 4, 4), r"text_length \(0\) must be at least 1"),
        (("row", 6, -1, 4), r"height \(-1\) must be at least 0"),
        (("row", 6, 4, 0), r"width \(0\) must be at least 1"),
        (("convolution", 6, 4, 4, 2), r"kernel_size \(2\) must be odd"),
    ],
)
def test_bad_pattern_names_the_argument(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionPattern(*arguments)
