import math

import pytest
import torch
from hypothesis import given, strategies as st

from lightning_dalle.distributed.powersgd.plan import plan_compression

shapes = st.dictionaries(
    st.text("abc", min_size=1, max_size=4), st.lists(st.integers(0, 30), max_size=4).map(tuple), max_size=6
)


@given(shapes, st.integers(1, 20), st.floats(0, 100), st.integers(0, 100))
def test_every_tensor_is_planned_once_and_compression_saves_what_it_must(
    shapes: dict[str, tuple[int, ...]], rank: int, min_compression_rate: float, min_elements: int
) -> None:
    plan = plan_compression(shapes, rank=rank, min_compression_rate=min_compression_rate, min_elements=min_elements)
    indices = [matrix.index for matrix in plan.matrices]
    assert sorted([*indices, *plan.uncompressed]) == list(range(len(shapes)))
    assert plan.num_elements == sum(math.prod(shape) for shape in shapes.values())
    for matrix in plan.matrices:
        numel = math.prod(shapes[matrix.name])
        assert 1 <= matrix.rank <= matrix.rows <= matrix.columns
        assert matrix.rows * matrix.columns == numel >= min_elements
        assert matrix.num_sent * min_compression_rate <= numel


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_matrix_is_a_view_with_no_more_rows_than_columns(shape: list[int]) -> None:
    (matrix,) = plan_compression({"weight": shape}, rank=1, min_compression_rate=0).matrices
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    viewed = matrix.matrix_of(tensor)
    assert viewed.shape == (matrix.rows, matrix.columns)
    viewed.zero_()
    assert not tensor.any()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 9))
def test_matrix_can_be_taken_as_it_is_below_full_rank(shape: list[int], rank: int) -> None:
    (matrix,) = plan_compression({"weight": shape}, rank=rank, min_compression_rate=0, transpose=False).matrices
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    viewed = matrix.matrix_of(tensor)
    assert viewed.shape == (matrix.rows, matrix.columns)
    assert torch.equal(viewed, tensor.flatten(1)) or rank >= matrix.rows
    assert matrix.rank == min(rank, matrix.rows, matrix.columns)


@pytest.mark.parametrize(("width", "rank", "rate"), [(1920, 512, 0.833), (2688, 640, 0.851), (3968, 896, 0.859)])
def test_rate_of_the_paper_s_layout(width: int, rank: int, rate: float) -> None:
    shards = 8
    layer = dict.fromkeys(("query", "key", "value", "output"), (width, width // shards))
    # The first matrix of the feed-forward network is sharded along its second axis, the second along its first.
    layer |= {"fc1": (width, 4 * width // shards), "fc2": (4 * width // shards, width)}
    plan = plan_compression(layer, rank=rank // shards)
    assert len(plan.matrices) == 6
    assert plan.rate == pytest.approx(1 - 5 * rank / (8 * width), rel=1e-12)
    assert plan.rate == pytest.approx(rate, abs=5e-4)


def test_excluded_and_thin_gradients_are_not_compressed() -> None:
    plan = plan_compression(
        {"embedding": (100, 50), "bias": (50,), "thin": (100, 3), "weight": (100, 50), "scale": ()},
        rank=2,
        excluded=frozenset({"embedding"}),
    )
    assert [matrix.name for matrix in plan.matrices] == ["weight"]
    assert plan.uncompressed == (0, 1, 2, 4)
    assert plan.rate == pytest.approx((5000 - 2 * 150) / (5000 + 50 + 300 + 5000 + 1))


def test_empty_plan_has_no_rate() -> None:
    assert plan_compression({}, rank=3).rate == 0
