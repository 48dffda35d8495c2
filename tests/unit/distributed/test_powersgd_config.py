from typing import Any

import pytest

from lightning_dalle.distributed.powersgd.config import PowerSGDConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"matrix_approximation_rank": 0}, r"rank \(0\) must be at least 1"),
        ({"min_compression_rate": 1.0}, r"min_compression_rate \(1.0\) must be below 1"),
        ({"start_powersgd_iter": -1}, r"start_powersgd_iter \(-1\) must be at least 0"),
        ({"wire_format": "fp8"}, r"format \('fp8'\) is unknown; it is one of fp32, bf16, 1-6-9"),
        ({"error_feedback_format": "fp8"}, r"format \('fp8'\) is unknown"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDConfig(**setting)
