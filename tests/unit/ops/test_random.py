"""Generators that depend on a key alone, and dropout factors as statistics and as a function of positions."""

import pytest
import torch

from lightning_dalle.ops.random import dropout_factors, keyed_generator


def test_same_key_gives_the_same_stream_whatever_the_global_state() -> None:
    torch.manual_seed(0)
    first = torch.rand(4, generator=keyed_generator((0, 7, 1)))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(4, generator=keyed_generator((0, 7, 1))))


def test_every_part_of_the_key_counts() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1), (0, 0)]
    assert len({torch.rand(1, generator=keyed_generator(key)).item() for key in keys}) == len(keys)


def test_golden_numbers_stay() -> None:
    # Written down once: another value would break the resume of older checkpoints.
    assert keyed_generator((3, 14, 15)).initial_seed() == 2064604913591531783


def _factors(dropout: float, seed: int = 0, sequences: int = 8, queries: int = 128, keys: int = 256) -> torch.Tensor:
    grid = torch.arange(sequences).view(-1, 1, 1), torch.arange(queries).view(-1, 1), torch.arange(keys)
    return dropout_factors(dropout, seed, *grid, torch.float64)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_asked_share_is_dropped_everywhere_and_the_mean_stays_one(dropout: float) -> None:
    factors = _factors(dropout)
    assert set(factors.unique().tolist()) == {0.0, 1 / (1 - dropout)}
    # Five standard errors of a binomial share.
    for means in (factors.mean(), factors.mean((1, 2)), factors.mean((0, 2)), factors.mean((0, 1))):
        error = (dropout / (1 - dropout) * means.numel() / factors.numel()) ** 0.5
        assert (means - 1).abs().max() < 5 * error


def test_neighbours_and_seeds_are_uncorrelated() -> None:
    factors = _factors(0.5) - 1
    others = [_factors(0.5, seed) - 1 for seed in (1, -1, 2**62)]
    pairs = [(factors, other) for other in others]
    pairs += [(factors[1:], factors[:-1]), (factors[:, 1:], factors[:, :-1]), (factors[..., 1:], factors[..., :-1])]
    for first, second in pairs:
        assert abs((first * second).mean()) < 5 / first.numel() ** 0.5


def test_no_dropout_keeps_all() -> None:
    assert torch.equal(_factors(0.0), torch.ones(8, 128, 256, dtype=torch.float64))


def test_shard_has_the_factors_of_the_whole() -> None:
    shard = dropout_factors(0.3, 5, torch.tensor(3), torch.tensor([[100], [7]]), torch.tensor([200, 9]), torch.float64)
    assert torch.equal(shard, _factors(0.3, 5)[3][[100, 7]][:, [200, 9]])
