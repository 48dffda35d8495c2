from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_dalle.distributed.powersgd.plan import uncompressed_names
from lightning_dalle.strategies import ShardedPowerSGDStrategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"matrix_approximation_rank": 2, "total_matrix_approximation_rank": 8},
            r"rank \(2\) and total_rank \(8\) say the same thing twice",
        ),
        ({"shard_size": 0}, r"shard_size \(0\) must be at least 1"),
        ({"matrix_approximation_rank": 0}, r"rank \(0\) must be at least 1"),
        ({"wire_format": "fp8"}, r"format \('fp8'\) is unknown"),
        ({"wire_format": "bf16", "overlap": True}, r"wire_format \('bf16'\) must be 'fp32' with overlap"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedPowerSGDStrategy(**settings)


def test_short_name_is_known() -> None:
    assert StrategyRegistry["sharded_powersgd"]["strategy"] is ShardedPowerSGDStrategy


def test_tied_parameters_are_excluded_by_any_of_their_names() -> None:
    network = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
    network["head"].weight = network["tokens"].weight
    assert uncompressed_names(network) == {"tokens.weight"}
    assert uncompressed_names(network, ["head.weight", "inner.*"]) == {"tokens.weight", "inner.weight", "inner.bias"}


def test_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern 'haed.*' matches no parameter; names are such as \['0.weight'"):
        uncompressed_names(nn.Sequential(nn.Linear(2, 2)), ["haed.*"])
