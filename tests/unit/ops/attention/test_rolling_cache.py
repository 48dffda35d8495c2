"""What a window holds at each step against the keys that the pattern's mask shows."""

import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.attention.kv_cache import RollingCache
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.unit.ops.attention.oracle import DECODABLE_KINDS


def _numbers(start: int, end: int) -> torch.Tensor:
    """Keys of two sequences and heads that say at which image position they stand."""
    return torch.arange(start, end, dtype=torch.float64).view(1, 1, -1, 1).expand(2, 2, -1, 1)


def _shown(window: RollingCache, index: int) -> list[int]:
    keys, values, mask = window.read(index)
    assert torch.equal(keys, -values)
    assert not keys.isnan().any(), "a slot is read that was not written"
    shown = torch.ones(keys.shape[2], dtype=torch.bool) if mask is None else mask.flatten() == 0
    return sorted(int(key) for key in keys[1, 1, shown, 0].tolist())


@given(
    kind=st.sampled_from(DECODABLE_KINDS),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    kernel_size=st.sampled_from((1, 3, 5, 11)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_window_shows_each_position_exactly_what_it_reaches(
    kind: PatternKind, height: int, width: int, kernel_size: int, data: st.DataObject
) -> None:
    pattern = AttentionPattern(kind, 2, height, width, kernel_size)
    window = RollingCache(pattern, _numbers(0, 1))
    window.keys.fill_(torch.nan)
    prefix = data.draw(st.integers(0, height)) * width
    window.fill(_numbers(0, prefix), -_numbers(0, prefix))
    for index in range(prefix, pattern.image_length):
        if index == (prefix + pattern.image_length) // 2:
            window = window.select(torch.tensor([1, 0, 1]))
        window.write(index, _numbers(index, index + 1)[:1], -_numbers(index, index + 1)[:1])
        reachable = pattern.mask()[2 + index].nonzero().flatten() - 2
        assert _shown(window, index) == reachable[reachable >= 0].tolist()


def test_window_has_slots_only_for_what_is_reached() -> None:
    slots = {
        kind: RollingCache(AttentionPattern(kind, 9, 32, 32), _numbers(0, 1)).keys.shape[2] for kind in DECODABLE_KINDS
    }
    # Row and the causal half of 11 x 11 in raster order; every column is read until the last row.
    assert slots == {"row": 33, "column": 1024, "convolution": 5 * 33 + 1, "causal": 1024}
