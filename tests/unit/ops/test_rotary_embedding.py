"""Rotations against golden numbers, their invariances, and the two pairings."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.rope import (
    Pairing,
    RotaryEmbedding,
    RotaryGridConfig,
    apply_rotary_emb,
    grid_angles,
    grid_coordinates,
    grid_rotation,
    half_split_order,
    rotary_angles,
)
from lightning_dalle.ops.rope_scaling import rotary_frequencies

GOLDEN_1D = json.loads((Path(__file__).parent / "rope_1d.json").read_text())
GOLDEN_3D = json.loads((Path(__file__).parent / "rope_3d.json").read_text())
AXES = RotaryGridConfig(original_max_position_embeddings=(2, 3, 4))
PAIRINGS: tuple[Pairing, ...] = ("interleaved", "half_split")


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _turned(vector: torch.Tensor, angles: torch.Tensor, pairing: Pairing = "interleaved") -> torch.Tensor:
    rotation = RotaryEmbedding(angles.cos().view(1, 1, -1), angles.sin().view(1, 1, -1))
    return apply_rotary_emb(vector.view(1, 1, 1, -1), rotation, pairing).flatten()


def _score_1d(query_position: float, key_position: float, pairing: Pairing) -> float:
    frequencies = rotary_frequencies(64, GOLDEN_1D["base"])
    sides = ((GOLDEN_1D["q"], query_position), (GOLDEN_1D["k"], key_position))
    query, key = (_turned(_tensor(side), rotary_angles(_tensor(at), frequencies), pairing) for side, at in sides)
    return float(query @ key)


def _score_3d(query_at: tuple[float, ...], key_at: tuple[float, ...], config: RotaryGridConfig = AXES) -> float:
    angles = grid_angles(_tensor([query_at, key_at]), config, 64, (2, 3, 4))[0]
    return float(_turned(_tensor(GOLDEN_3D["q"]), angles[0]) @ _turned(_tensor(GOLDEN_3D["k"]), angles[1]))


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("gap", range(4))
def test_golden_1d_scores_wherever_the_gap_begins(start: int, gap: int) -> None:
    expected = GOLDEN_1D["score_interleaved_by_gap"][str(gap)]
    assert _score_1d(start, start + gap, "interleaved") == pytest.approx(expected, abs=1e-12)


def test_golden_1d_score_of_the_half_split_pairing() -> None:
    assert _score_1d(0, 3, "half_split") == pytest.approx(GOLDEN_1D["score_half_split_gap3"], abs=1e-12)


def test_golden_3d_angles() -> None:
    angles, amplitudes = grid_angles(grid_coordinates((2, 3, 4)), AXES, GOLDEN_3D["head_dim"], (2, 3, 4))
    torch.testing.assert_close(angles, _tensor(GOLDEN_3D["angles_2x3x4"]), rtol=0, atol=1e-12)
    assert AXES.split(64) == tuple(GOLDEN_3D["axis_dims"])
    assert (amplitudes == 1).all()


def test_golden_3d_scores() -> None:
    assert _score_3d((0, 0, 0), (0, 1, 0)) == pytest.approx(GOLDEN_3D["score_000_010"], abs=1e-12)
    assert _score_3d((0, 1, 2), (1, 2, 3)) == pytest.approx(GOLDEN_3D["score_012_123"], abs=1e-12)
    halved = RotaryGridConfig(original_max_position_embeddings=(2, 3, 4), coordinate_scale=(1, 0.5, 1))
    expected = GOLDEN_3D["score_000_010_height_interpolated_x2"]
    assert _score_3d((0, 0, 0), (0, 1, 0), halved) == pytest.approx(expected, abs=1e-12)


def test_flattened_positions_would_depend_on_the_width() -> None:
    # The golden reason for three axes: the row below is a different gap on a wider grid.
    frequencies = rotary_frequencies(64, 10000.0)
    query, key = _tensor(GOLDEN_3D["q"]), _tensor(GOLDEN_3D["k"])
    below = [float(_turned(query, 0 * frequencies) @ _turned(key, width * frequencies)) for width in (4, 8)]
    assert below == pytest.approx(GOLDEN_3D["flattened_1d_scores_width_4_8"], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    shift=st.tuples(*[st.floats(-50, 50)] * 3),
    pairing=st.sampled_from(PAIRINGS),
    head_dim=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_scores_depend_on_relative_positions_and_norms_stay(
    shift: tuple[float, float, float], pairing: Pairing, head_dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 1, 3, 24, head_dim, dtype=torch.float64, generator=generator)
    coordinates = grid_coordinates((2, 3, 4)).double()
    scores = []
    for places in (coordinates, coordinates + _tensor(shift)):
        angles = grid_angles(places, AXES, head_dim, (2, 3, 4))[0].unsqueeze(0)
        rotation = RotaryEmbedding(angles.cos(), angles.sin())
        turned = apply_rotary_emb(query, rotation, pairing), apply_rotary_emb(key, rotation, pairing)
        torch.testing.assert_close(turned[0].norm(dim=-1), query.norm(dim=-1), rtol=1e-12, atol=0)
        scores.append(turned[0] @ turned[1].mT)
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-10)
    assert not torch.allclose(scores[0], query @ key.mT)


def test_pairings_differ_by_the_permutation_alone() -> None:
    features = torch.randn(2, 3, 24, 64, dtype=torch.float64)
    rotation, order = grid_rotation(AXES, 64, (2, 3, 4)), half_split_order(64)
    half_split = apply_rotary_emb(features[..., order], rotation, "half_split")
    interleaved = apply_rotary_emb(features, rotation, "interleaved")
    torch.testing.assert_close(half_split, interleaved[..., order], rtol=0, atol=0)
    torch.testing.assert_close(half_split[..., order.argsort()], interleaved, rtol=0, atol=0)
    assert not torch.allclose(apply_rotary_emb(features, rotation, "half_split"), interleaved)
    for pairing in PAIRINGS:
        prepared = rotation.for_many(pairing)
        assert (prepared.phases is None) == (pairing == "half_split")
        assert torch.equal(apply_rotary_emb(features, prepared, pairing), apply_rotary_emb(features, rotation, pairing))


def test_text_in_front_stays_unrotated() -> None:
    features = torch.randn(1, 2, 5 + 24, 64)
    rotation = grid_rotation(AXES, 64, (2, 3, 4), None, 5, torch.float32)
    turned = apply_rotary_emb(features, rotation)
    assert torch.equal(turned[:, :, :5], features[:, :, :5])
    assert not torch.allclose(turned[:, :, 6:], features[:, :, 6:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_angles_are_wide_under_any_autocast(dtype: torch.dtype) -> None:
    features = torch.randn(1, 1, 24, 32, dtype=dtype)
    outside = grid_rotation(AXES, 32, (2, 3, 4), dtype=torch.float32)
    grid_rotation.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Odd numbers above 256 are none in bfloat16.
        far = rotary_angles(torch.tensor([1023]), torch.ones(1).double())
        inside = grid_rotation(AXES, 32, (2, 3, 4), dtype=torch.float32)
        turned = apply_rotary_emb(features, inside)
    assert float(far) == 1023
    assert all(torch.equal(one, other) for one, other in zip(inside[:2], outside[:2], strict=True))
    assert turned.dtype == dtype
    torch.testing.assert_close(turned, apply_rotary_emb(features.double(), inside).to(dtype))


def test_table_is_built_once_and_outlives_inference_mode() -> None:
    grid_rotation.cache_clear()
    with torch.inference_mode():
        table = grid_rotation(AXES, 32, (2, 3, 4))
    assert grid_rotation(AXES, 32, (2, 3, 4)) is table
    assert not table.cos.is_inference()
    features = torch.randn(1, 1, 24, 32, dtype=torch.float64, requires_grad=True)
    apply_rotary_emb(features, table).sum().backward()
    assert features.grad is not None


def test_config_of_plain_values_is_the_same_table() -> None:
    written: Any = {
        "original_max_position_embeddings": [2, 3, 4],
        "base": [1e4, 1e4, 1e4],
        "policies": ["default", {"kind": "default"}, "default"],
    }
    assert RotaryGridConfig(**written) == AXES
    assert hash(RotaryGridConfig(**written)) == hash(AXES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"original_max_position_embeddings": (1, 2)},
            r"original_max_position_embeddings \(\(1, 2\)\) must have three values",
        ),
        (
            {"original_max_position_embeddings": (0, 2, 2)},
            r"original_max_position_embeddings \(0, 2, 2\) must be positive",
        ),
        ({"base": "10000"}, r"base \('10000'\) must have three values"),
        ({"coordinate_scale": (1.0, 0.0, 1.0)}, "coordinate_scale .* must be positive"),
        ({"axis_dims": (15, 9, 8)}, "axis_dims .* must be even"),
        ({"pairing": "split"}, r"pairing \('split'\) must be one of interleaved, half_split"),
        ({"policies": "default"}, r"policies \('default'\) must have three values"),
        ({"policies": ("default", "riflex", "default")}, "policies has RIFLEx on height; it is for time"),
        ({"policies": ("far", "default", "default")}, r"policy \('far'\) must have a kind among default, "),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryGridConfig(**{"original_max_position_embeddings": (2, 3, 4), **changes})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim \(24\) must be a multiple of 16"):
        AXES.split(24)
    with pytest.raises(ValueError, match=r"axis_dims \(8, 8, 8\) must add up to head_dim \(32\)"):
        RotaryGridConfig(original_max_position_embeddings=(2, 3, 4), axis_dims=(8, 8, 8)).split(32)
    assert math.isclose(float(rotary_frequencies(2, 5.0)[0]), 1.0)
