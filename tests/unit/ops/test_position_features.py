"""Waves of positions: one length, told by distance alone, all places apart, and moved as policies say."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rope import (
    Policies,
    RotaryGridConfig,
    position_features,
    position_frequencies,
    resolve_policies,
)

TRAINED = (4, 3, 5)
WAVES = 24
DEFAULT = ("default",) * 3


def _waves(grid: Grid, policies: Policies = DEFAULT, trained: Grid = TRAINED, **changes: Any) -> torch.Tensor:
    config = RotaryGridConfig(original_max_position_embeddings=trained, **changes)
    return position_features(config, 32, grid, resolve_policies(policies), WAVES).unflatten(0, grid)


def test_first_waves_by_hand() -> None:
    # Sobol's third point, (3/4, 1/4, 1/4), is half way up each range, on either side.
    frequencies = position_frequencies(TRAINED, 2)
    lengths = torch.tensor(TRAINED, dtype=torch.float64)
    middle = (math.pi / lengths * math.pi / 2).sqrt()
    torch.testing.assert_close(frequencies[0], middle * torch.tensor([1, -1, -1]), rtol=0, atol=1e-15)


@settings(deadline=None)
@given(grid=st.tuples(*[st.integers(1, 6)] * 3), longer=st.tuples(*[st.integers(0, 3)] * 3))
def test_places_of_one_length_are_told_apart_by_their_distance_alone(grid: Grid, longer: Grid) -> None:
    trained = (grid[0] + longer[0], grid[1] + longer[1], grid[2] + longer[2])
    waves = _waves(grid, trained=trained).flatten(0, 2)
    likeness = waves @ waves.T
    torch.testing.assert_close(likeness.diagonal(), torch.full((len(waves),), float(WAVES)).double())
    others = likeness - WAVES * torch.eye(len(waves))
    assert others.max() < WAVES - 1e-3 or len(waves) == 1
    if grid[2] > 2:
        whole = _waves(grid, trained=trained)
        near = (whole[:, :, :-2] * whole[:, :, 2:]).sum(-1)
        torch.testing.assert_close(near, near[:1, :1, :1].expand_as(near))


def test_frequencies_stay_between_half_a_turn_of_the_axis_and_of_two_tokens() -> None:
    frequencies = position_frequencies((4, 1, 60), 1000).abs()
    for axis, lowest in enumerate((math.pi / 4, math.pi / 2, math.pi / 60)):
        drawn = frequencies[:, axis]
        assert lowest * (1 - 1e-12) <= drawn.min() <= 1.02 * lowest
        assert 0.98 * math.pi / 2 <= drawn.max() <= math.pi / 2 * (1 + 1e-12)
        assert drawn.log().mean() == pytest.approx(math.log(lowest * math.pi / 2) / 2, abs=0.02)


def test_longer_grids_begin_as_the_trained_one() -> None:
    # YaRN would leave frequencies alone on axes long enough for the highest to turn 32 times.
    for policies in (DEFAULT, ("riflex", "ntk_aware", {"kind": "yarn", "slow_rotations": 0.1, "fast_rotations": 0.4})):
        longer = _waves((6, 5, 8), policies)
        torch.testing.assert_close(longer[:4, :3, :5], _waves(TRAINED), rtol=0, atol=1e-12)


def test_interpolated_ends_lie_on_the_trained_ends() -> None:
    interpolated = _waves((7, 5, 9), ("position_interpolation",) * 3)
    torch.testing.assert_close(interpolated[::2, ::2, ::2], _waves(TRAINED), rtol=0, atol=1e-12)
    halves = _waves((8, 3, 5), ({"kind": "frame_rate_aware", "trained_fps": 8, "fps": 16}, "default", "default"))
    torch.testing.assert_close(halves[::2], _waves(TRAINED), rtol=0, atol=1e-12)


def test_a_step_along_each_axis_rotates_each_feature_by_its_frequency() -> None:
    frequencies = position_frequencies(TRAINED, WAVES)
    waves = _waves(TRAINED, base=(100.0,) * 3, coordinate_scale=(2.0,) * 3)
    phases = torch.complex(*waves.chunk(2, dim=-1))
    for axis in range(3):
        for earlier, later in pairwise(phases.unbind(axis)):
            turned = later * earlier.conj()
            expected = torch.polar(torch.ones(WAVES, dtype=torch.float64), frequencies[:, axis])
            torch.testing.assert_close(turned, expected.expand_as(turned), rtol=0, atol=1e-12)


def test_tables_are_cached_and_serve_training_after_sampling() -> None:
    with torch.inference_mode():
        first = _waves((2, 2, 2))
    second = _waves((2, 2, 2))
    assert not second.is_inference()
    assert first.data_ptr() == second.data_ptr()


def test_default_device_is_of_no_account() -> None:
    with torch.device("meta"):
        waves = _waves((2, 3, 1))
    assert waves.device.type == "cpu"
