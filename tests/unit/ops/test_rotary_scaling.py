"""Policies for axes longer than in training, against golden numbers, their formulas and their limits."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.rope import RotaryGridConfig, grid_angles, grid_coordinates, grid_rotation, resolve_policies
from lightning_dalle.ops.rope_scaling import (
    POLICIES,
    Default,
    ExtrapolationPolicy,
    FrameRateAware,
    NTKAware,
    PositionInterpolation,
    RIFLEx,
    YaRN,
    as_policy,
    rotary_frequencies,
)

GOLDEN = json.loads((Path(__file__).parent / "rope_1d.json").read_text())
GROWING = [PositionInterpolation(), PositionInterpolation("ratio"), NTKAware(), YaRN(), RIFLEx()]


def _assert_close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_golden_frequencies_at_eight_times_the_length() -> None:
    base = GOLDEN["base"]
    _assert_close(PositionInterpolation("ratio").frequencies(64, base, 100, 800), GOLDEN["position_interpolation_x8"])
    _assert_close(NTKAware().frequencies(64, base, 100, 800), GOLDEN["ntk_aware_x8"])


@settings(max_examples=30, deadline=None)
@given(trained=st.integers(2, 60), target=st.integers(2, 200), dim=st.sampled_from([4, 6, 24]))
def test_end_points_align(trained: int, target: int, dim: int) -> None:
    interpolated = PositionInterpolation().frequencies(dim, 100.0, trained, target)
    _assert_close((target - 1) * interpolated, (trained - 1) * rotary_frequencies(dim, 100.0))


@pytest.mark.parametrize("policy", GROWING)
def test_an_axis_of_the_trained_length_or_of_one_point_keeps_its_angles(policy: ExtrapolationPolicy) -> None:
    config = RotaryGridConfig(original_max_position_embeddings=(5, 3, 4), policies=("default", "default", "default"))
    policies = (policy, "default", "default") if isinstance(policy, RIFLEx) else (policy, policy, policy)
    for grid in ((5, 3, 4), (1, 1, 1)):
        plain, _ = grid_angles(grid_coordinates(grid), config, 32, grid)
        angles, amplitudes = grid_angles(grid_coordinates(grid), config, 32, grid, policies)
        _assert_close(angles, plain)
        assert (amplitudes == 1).all()


def test_policies_act_on_their_own_axis_alone() -> None:
    config = RotaryGridConfig(original_max_position_embeddings=(4, 4, 4))
    plain, _ = grid_angles(grid_coordinates((8, 8, 8)), config, 32, (8, 8, 8))
    for axis, pairs in enumerate((slice(0, 4), slice(4, 10), slice(10, 16))):
        policies: list[Any] = ["default"] * 3
        policies[axis] = PositionInterpolation()
        angles, _ = grid_angles(grid_coordinates((8, 8, 8)), config, 32, (8, 8, 8), policies)
        changed = (angles != plain).any(dim=0)
        assert changed[pairs].all()
        assert int(changed.sum()) == pairs.stop - pairs.start


def test_ntk_aware_keeps_the_highest_frequency_and_interpolates_the_lowest() -> None:
    frequencies, plain = NTKAware().frequencies(24, 10000.0, 10, 25), rotary_frequencies(24, 10000.0)
    assert frequencies[0] == plain[0]
    assert float(frequencies[-1] / plain[-1]) == pytest.approx(10 / 25, abs=1e-12)


def test_yarn_leaves_fast_pairs_interpolates_slow_ones_and_blends_between() -> None:
    trained, target, base = 4096, 16384, 10000.0
    policy, plain = YaRN(), rotary_frequencies(64, base)
    for frequency, before in zip(policy.frequencies(64, base, trained, target).tolist(), plain.tolist(), strict=True):
        rotations = trained * before / (2 * math.pi)
        kept = min(max((rotations - 1) / 31, 0.0), 1.0)
        assert frequency == pytest.approx((1 - kept) * before / 4 + kept * before, abs=1e-12)
    assert policy.amplitude(trained, target) == pytest.approx(0.1 * math.log(4) + 1)
    assert YaRN(temperature=False).amplitude(trained, target) == 1


def test_yarn_s_temperature_reaches_the_rotation() -> None:
    config = RotaryGridConfig(original_max_position_embeddings=(2, 2, 2))
    _, amplitudes = grid_angles(grid_coordinates((2, 4, 2)), config, 32, (2, 4, 2), ("yarn", "yarn", "yarn"))
    _assert_close(amplitudes, [1.0] * 4 + [0.1 * math.log(2) + 1] * 6 + [1.0] * 6)


def test_temperature_lengthens_what_is_rotated() -> None:
    config = RotaryGridConfig(original_max_position_embeddings=(2, 2, 2), policies=("default", "yarn", "default"))
    rotation = grid_rotation(config, 32, (2, 4, 2))
    lengths = (rotation.cos.square() + rotation.sin.square()).sqrt()
    _assert_close(lengths[0, 5], [1.0] * 4 + [0.1 * math.log(2) + 1] * 6 + [1.0] * 6)


def test_riflex_lowers_one_frequency_so_that_the_clip_stays_within_its_period() -> None:
    plain, lowered = rotary_frequencies(16, 10000.0), RIFLEx().frequencies(16, 10000.0, 20, 60)
    periods = 2 * math.pi / plain
    nearest = int((periods - 20).abs().argmin())
    assert [index for index in range(8) if plain[index] != lowered[index]] == [nearest]
    assert float(60 * lowered[nearest]) == pytest.approx(0.9 * 2 * math.pi)
    chosen = RIFLEx(component=2).frequencies(16, 10000.0, 20, 70)
    assert [index for index in range(8) if plain[index] != chosen[index]] == [2]


def test_riflex_changes_nothing_within_the_period() -> None:
    _assert_close(RIFLEx(component=3).frequencies(16, 10000.0, 20, 60), rotary_frequencies(16, 10000.0))


def test_frame_rate_aware_time_counts_seconds() -> None:
    policy = FrameRateAware(trained_fps=24, fps=12)
    # Frame 5 at 12 frames a second is as late as frame 10 at 24.
    _assert_close(5 * policy.frequencies(16, 100.0, 9, 9), 10 * rotary_frequencies(16, 100.0))


@pytest.mark.parametrize("policy", [*GROWING, Default(), FrameRateAware(24, 12)])
def test_policies_survive_as_plain_mappings(policy: ExtrapolationPolicy) -> None:
    mapping = dataclasses.asdict(policy)
    assert as_policy(mapping) == policy
    assert POLICIES[mapping["kind"]] is type(policy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rotary_frequencies(5, 10.0), r"dim \(5\) must be even"),
        (lambda: rotary_frequencies(4, 0.0), r"base \(0.0\) must be positive"),
        (lambda: PositionInterpolation("middle"), r"alignment \('middle'\) must be 'endpoints' or 'ratio'"),  # type: ignore[arg-type]
        (lambda: PositionInterpolation().frequencies(4, 10.0, 1, 3), "an axis of 3 points has no place"),
        (lambda: NTKAware().frequencies(2, 10.0, 4, 8), r"dim \(2\) must be at least 4 for NTKAware"),
        (lambda: YaRN(slow_rotations=3, fast_rotations=2), r"slow_rotations \(3\) must be"),
        (lambda: RIFLEx(component=9).frequencies(16, 10.0, 4, 8), r"component \(9\) must be in 0..7"),
        (lambda: FrameRateAware(0, 12), r"trained_fps \(0\) and fps \(12\) must be positive"),
        (lambda: as_policy("linear"), r"policy \('linear'\) must have a kind among"),
        (lambda: as_policy({"alignment": "ratio"}), "must have a kind among"),
        (lambda: as_policy({"kind": "yarn", "alpha": 1}), r"policy 'yarn' has no fields \['alpha'\]"),
        (lambda: resolve_policies("yarn"), r"policies \('yarn'\) must be three"),
        (lambda: resolve_policies(["default", "default", "frame_rate_aware"]), "missing"),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
