"""Parts of a packed sequence attend to themselves, as a dense mask says."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.packing import PackedSegments
from tests.rounding import assert_only_rounded

lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(lengths=lengths, seed=st.integers(0, 100))
def test_parts_attend_as_under_the_dense_mask(lengths: list[tuple[int, int]], seed: int) -> None:
    segments = PackedSegments(*(tuple(side) for side in zip(*lengths, strict=True)))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 3, sum(segments.query_lengths), 4, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 3, sum(segments.key_lengths), 4, dtype=torch.float64, generator=generator)
    of_queries, of_keys = segments.document_ids()
    mask = of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2)
    assert segments.length == query.shape[2]
    weights = (query @ key.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(attend(query, key, value, segments), weights @ value, rtol=0, atol=1e-12)


def test_bfloat16_loses_no_more_than_plain_bfloat16() -> None:
    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        document_ids = torch.tensor([0, 0, 1, 1, 1, 1])
        scores = (query @ key.mT / 2).masked_fill(document_ids.unsqueeze(-1) != document_ids, -torch.inf)
        return scores.softmax(-1) @ value

    def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, PackedSegments((2, 4), (2, 4)))

    low = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    exact = low.detach().double().requires_grad_()
    results = []
    for way, inputs in ((packed, low), (plain, low), (plain, exact)):
        output = way(*inputs)
        assert output.dtype == inputs.dtype
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    # Plain code rounds its scores and weights too.
    assert_only_rounded(*results, factor=1)


def test_some_queries_attend_as_among_all() -> None:
    segments = PackedSegments((2, 3, 1), (4, 1, 2), of_context=True)
    query = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 7, 4, dtype=torch.float64)
    whole = attend(query, key, value, segments)
    for positions in ([0, 1], [1, 2, 5], [3], list(range(6))):
        own = segments.of_queries(torch.tensor(positions))
        torch.testing.assert_close(own.attend(query[:, :, positions], key, value), whole[:, :, positions])


def test_bad_parts_are_named() -> None:
    with pytest.raises(ValueError, match="query_lengths has 2 parts and key_lengths 1"):
        PackedSegments((1, 2), (3,))
    with pytest.raises(ValueError, match="query_lengths has 0 parts"):
        PackedSegments((), ())
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"query has 3 positions, but query_lengths \(1, 1\) add up to 2"):
        attend(query, key, key, PackedSegments((1, 1), (2, 3)))
    with pytest.raises(ValueError, match=r"key has 5 positions, but key_lengths \(3, 1\) add up to 4"):
        attend(query, key, key, PackedSegments((1, 2), (3, 1)))
    with pytest.raises(ValueError, match=r"dropout \(0.1\) must be 0 for packed segments"):
        attend(query, key, key, PackedSegments((3,), (5,)), dropout=0.1)
