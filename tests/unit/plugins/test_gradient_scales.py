"""The movement of the scales against a table computed by hand."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_dalle.plugins import GradientScales

ROOT = math.sqrt(2)
GROWTH = 2 ** (1 / 1000)


def test_defaults_are_the_paper_s() -> None:
    scales = GradientScales(["a"], num_replicas=4)
    assert scales.scales == {"a": 4 * 2**13}
    assert (scales.min_scale, scales.max_scale) == (4 * 2**7, 4 * 2**24)
    for _ in range(1000):
        scales.update({"a": True})
    assert scales.scales["a"] == pytest.approx(2 * 4 * 2**13, rel=1e-12)


# (update, finite, scale of "a" after it), in units of 2**13: growth by 2**(1/1000), division by the square root of 2,
# none again within 125 updates, and growth in between.
TABLE = [
    (1, True, GROWTH),
    (2, True, GROWTH**2),
    (3, False, GROWTH**2 / ROOT),
    (4, False, GROWTH**2 / ROOT),
    (5, True, GROWTH**3 / ROOT),
    (127, False, GROWTH**124 / ROOT),  # 121 finite updates from 6 to 126; 124 updates after the division
    (128, False, GROWTH**124 / 2),  # 125 after it
    (129, False, GROWTH**124 / 2),
    (252, False, GROWTH**246 / 2),  # 122 finite updates from 130 to 251; 124 after the division
    (253, True, GROWTH**247 / 2),
    (254, False, GROWTH**247 / (2 * ROOT)),
]


def test_scales_follow_the_table_and_leave_each_other_alone() -> None:
    scales = GradientScales(["a", "b"])
    events = {update: (finite, scale) for update, finite, scale in TABLE}
    for update in range(1, 255):
        finite, expected = events.get(update, (True, None))
        scales.update({"a": finite, "b": True})
        if expected is not None:
            assert scales.scales["a"] == pytest.approx(2**13 * expected, rel=1e-12), update
        assert scales.scales["b"] == pytest.approx(2**13 * GROWTH**update, rel=1e-12)
    assert scales.num_divisions == {"a": 3, "b": 0}
    assert scales.num_growths == {"a": 247, "b": 254}


def test_a_block_that_is_not_named_does_not_move() -> None:
    scales = GradientScales(["a", "b"])
    scales.update({"a": True})
    assert scales.scales["b"] == 2**13


def test_scales_are_clamped_after_each_change() -> None:
    scales = GradientScales(["up", "down"], initial_scale=8, growth_factor=3, backoff_factor=3, backoff_interval=1,
                            min_scale=2, max_scale=30)  # fmt: skip
    trace = []
    for _ in range(3):
        scales.update({"up": True, "down": False})
        trace.append((scales.scales["up"], scales.scales["down"]))
    assert trace == [(24, pytest.approx(8 / 3)), (30, 2), (30, 2)]


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_divisions_keep_their_distance_and_scales_their_bounds(finite: list[bool], window: int) -> None:
    scales = GradientScales(["a"], backoff_interval=window, growth_factor=1.2)
    divided_at = []
    for update, is_finite in enumerate(finite):
        before = scales.num_divisions["a"]
        scales.update({"a": is_finite})
        if scales.num_divisions["a"] > before:
            divided_at.append(update)
        assert 2**7 <= scales.scales["a"] <= 2**24
    assert all(later - earlier >= window for earlier, later in itertools.pairwise(divided_at))


def test_state_goes_on_in_the_middle_of_a_window() -> None:
    first, second = GradientScales(["a"]), GradientScales(["a"])
    for update in range(60):
        first.update({"a": update % 7 != 3})
    second.load_state_dict(first.state_dict())
    for update in range(60, 400):
        for scales in (first, second):
            scales.update({"a": update % 7 != 3})
        assert first.scales == second.scales
    assert first.state_dict() == second.state_dict()


def test_state_of_other_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lack the blocks \['b'\] and have unknown ones \['a'\]; name the blocks as"):
        GradientScales(["b"]).load_state_dict(GradientScales(["a"]).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_scale": 1.0}, r"min_scale \(128.0\), initial_scale \(1.0\) and max_scale .* in this order"),
        ({"growth_factor": 0.5}, r"growth_factor \(0.5\) and backoff_factor \(1.41.*\) must be at least 1"),
        ({"backoff_interval": 0}, r"backoff_interval \(0\) and num_replicas \(1\) must be at least 1"),
    ],
)
def test_wrong_constants_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientScales(["a"], **options)
