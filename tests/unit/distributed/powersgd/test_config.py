from typing import Any

import pytest

from lightning_dalle.distributed.powersgd.config import PowerSGDConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"matrix_approximation_rank": 0}, r"matrix_approximation_rank \(0\) must be at least 1"),
        ({"min_compression_rate": -1.0}, r"min_compression_rate \(-1.0\) must be at least 0"),
        ({"start_powersgd_iter": -1}, r"start_powersgd_iter \(-1\) must be at least 0"),
        ({"wire_format": "fp8"}, r"format \('fp8'\) is unknown; it must be one of fp32, bf16, 1-6-9"),
        ({"error_feedback_format": "fp8"}, r"format \('fp8'\) is unknown"),
        ({"total_matrix_approximation_rank": 0}, r"total_matrix_approximation_rank \(0\) must be at least 1"),
        ({"wire_format": "bf16", "overlap": True}, r"wire_format \('bf16'\) must be 'fp32' with overlap"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDConfig(**setting)


def test_total_rank_is_divided_among_shards() -> None:
    config = PowerSGDConfig(total_matrix_approximation_rank=8, warm_start=True)
    assert config.per_shard(4) == PowerSGDConfig(matrix_approximation_rank=2, warm_start=True)
    with pytest.raises(ValueError, match=r"total_matrix_approximation_rank \(8\) must be a multiple of .* \(3\)"):
        config.per_shard(3)
