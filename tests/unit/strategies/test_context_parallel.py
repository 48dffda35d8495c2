from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dalle import ContextParallelStrategy, PowerSGDConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_parallel_degree": 0}, r"context_parallel_degree \(0\) must be at least 1"),
        ({"attention": "flash"}, r"attention \('flash'\) must be one of ring, ulysses, usp"),
        ({"attention": "usp"}, r"ulysses_degree \(None\) must be given with attention='usp'"),
        ({"ulysses_degree": 2}, r"ulysses_degree \(2\) must be given with attention='usp', and with no other"),
        ({"layout": "striped"}, r"layout \('striped'\) must be one of contiguous, zigzag"),
        ({"powersgd": PowerSGDConfig()}, "shard_size is None; give shard_size=1"),
        ({"shard_size": 0}, r"shard_size \(0\) must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallelStrategy(**settings)


def test_short_name_is_known() -> None:
    assert StrategyRegistry["context_parallel"]["strategy"] is ContextParallelStrategy
