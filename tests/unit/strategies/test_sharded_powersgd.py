import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn

from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.plan import uncompressed_names
from lightning_dalle.strategies import ShardedPowerSGDStrategy


def test_shard_size_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shard_size \(0\) must be at least 1"):
        ShardedPowerSGDStrategy(shard_size=0)


def test_short_name_is_known() -> None:
    assert StrategyRegistry["sharded_powersgd"]["strategy"] is ShardedPowerSGDStrategy


def test_settings_come_from_a_configuration_file() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    settings = {"shard_size": 2, "exclude": ["head.*"], "powersgd": {"matrix_approximation_rank": 8, "overlap": True}}
    config = {"strategy": {"class_path": "lightning_dalle.ShardedPowerSGDStrategy", "init_args": settings}}
    strategy = parser.instantiate(parser.parse_object(config)).strategy
    assert isinstance(strategy, ShardedPowerSGDStrategy)
    assert (strategy.shard_size, strategy.exclude) == (2, ("head.*",))
    assert strategy.powersgd == PowerSGDConfig(matrix_approximation_rank=8, overlap=True)


def test_tied_parameters_are_excluded_by_any_of_their_names() -> None:
    network = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
    network["head"].weight = network["tokens"].weight
    assert uncompressed_names(network) == {"tokens.weight"}
    assert uncompressed_names(network, ["head.weight", "inner.*"]) == {"tokens.weight", "inner.weight", "inner.bias"}


def test_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern 'haed.*' matches no parameter; names are such as \['0.weight'"):
        uncompressed_names(nn.Sequential(nn.Linear(2, 2)), ["haed.*"])
