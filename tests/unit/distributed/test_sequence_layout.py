"""Cuts of a sequence: nothing lost, nothing twice, as even as it can be."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout

KINDS = get_args(LayoutKind)


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    kind, ranks = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5))
    return SequenceLayout(draw(st.integers(2 * ranks, 60)), ranks, kind)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_position_lies_on_one_rank(layout: SequenceLayout) -> None:
    positions = [layout.positions(rank) for rank in range(layout.num_ranks)]
    assert torch.cat(positions).sort().values.tolist() == list(range(layout.length))
    lengths = [layout.local_length(rank) for rank in range(layout.num_ranks)]
    assert lengths == [len(own) for own in positions]
    # Runs differ by one position at most.
    assert max(lengths) - min(lengths) <= (2 if layout.kind == "zigzag" else 1)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_parts_make_the_whole_again(layout: SequenceLayout) -> None:
    whole = torch.randn(2, layout.length, 3)
    parts = [layout.shard(whole, rank, dim=1) for rank in range(layout.num_ranks)]
    assert torch.equal(parts[-1], whole[:, layout.positions(layout.num_ranks - 1)])
    assert torch.equal(layout.unshard(parts, dim=1), whole)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_labels_are_the_next_tokens_of_the_whole(layout: SequenceLayout) -> None:
    tokens = torch.randint(100, (2, layout.length))
    labels = layout.unshard([layout.labels(tokens, rank) for rank in range(layout.num_ranks)])
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert labels[:, -1].tolist() == [-100, -100]


def test_labels_end_with_a_document() -> None:
    layout = SequenceLayout(6, 2, "zigzag")
    tokens, document_ids = torch.arange(10, 16), torch.tensor([0, 0, 1, 1, 1, 2])
    labels = [layout.labels(tokens, rank, document_ids, ignore_index=-1) for rank in range(2)]
    assert layout.unshard(labels).tolist() == [11, -1, 13, 14, -1, -1]
    assert tokens.tolist() == list(range(10, 16))


def test_gradients_flow_to_the_own_part() -> None:
    whole = torch.zeros(5, requires_grad=True)
    SequenceLayout(5, 2, "zigzag").shard(whole, 1).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [0, 1, 1, 0, 0]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="kind \\('striped'\\) must be one of contiguous, zigzag"):
        SequenceLayout(8, 2, "striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_ranks \(0\) must be at least 1"):
        SequenceLayout(8, 0)
    with pytest.raises(
        ValueError, match=r"length \(3\) must be at least 4, the runs of a zigzag layout on num_ranks \(2"
    ):
        SequenceLayout(3, 2, "zigzag")
    with pytest.raises(ValueError, match="tensor has 7 positions along dim -1, but the layout has length 8"):
        SequenceLayout(8, 2).shard(torch.zeros(7), 0)
