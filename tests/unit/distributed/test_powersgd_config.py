from typing import Any

import pytest

from lightning_dalle.distributed.powersgd_config import PowerSGDConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": 0}, r"rank \(0\) must be at least 1"),
        ({"minimum_rate": 1.0}, r"minimum_rate \(1.0\) must be below 1"),
        ({"uncompressed_steps": -1}, r"uncompressed_steps \(-1\) must be at least 0"),
        ({"wire_format": "fp8"}, r"format \('fp8'\) is unknown; it is one of fp32, bf16, 1-6-9"),
        ({"residual_format": "fp8"}, r"format \('fp8'\) is unknown"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDConfig(**setting)
