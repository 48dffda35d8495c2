"""Schedules of values over updates."""

import pytest
from hypothesis import given, strategies as st

from lightning_dalle.ops.schedules import CosineSchedule


@pytest.mark.parametrize(
    ("start", "end", "updates"), [(0.0, 6.6, 5_000), (1.0, 1 / 16, 150_000), (1e-4, 1.25e-6, 1_200_000)]
)
def test_end_points_are_exact_and_the_middle_is_the_mean(start: float, end: float, updates: int) -> None:
    schedule = CosineSchedule(start=start, end=end, steps=updates)
    assert schedule(0) == start
    assert schedule(updates) == schedule(10 * updates) == end
    assert schedule(updates // 2) == pytest.approx((start + end) / 2)


def test_schedule_is_flat_at_both_ends() -> None:
    schedule = CosineSchedule(start=0, end=1, steps=1000)
    assert schedule(1) < 1e-5
    assert 1 - schedule(999) < 1e-5


@given(updates=st.integers(1, 50), update=st.integers(0, 100))
def test_schedule_never_turns_back(updates: int, update: int) -> None:
    schedule = CosineSchedule(start=2.0, end=-1.0, steps=updates)
    assert schedule(update + 1) <= schedule(update)


def test_zero_updates_is_the_end_from_the_beginning() -> None:
    assert CosineSchedule(start=0, end=3, steps=0)(0) == 3


def test_negative_updates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"steps \(-1\) must be at least 0; 0 takes the end value \(3\)"):
        CosineSchedule(start=0, end=3, steps=-1)
