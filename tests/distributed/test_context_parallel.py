"""Training under the strategy on real ranks against the same training in one process."""

import functools
from typing import Any

import pytest

from lightning_dalle import PowerSGDConfig
from tests.distributed.language_model import BatchSharded, Foreign, LayerSharded, fit_alone, fit_on_rank, mean_losses
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.rounding import assert_only_rounded, flattened

pytestmark = LIGHTNING_WARNINGS
FULL_RANK = PowerSGDConfig(matrix_approximation_rank=99, min_compression_rate=0.0)
ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
Case = tuple[dict[str, Any], type[LayerSharded], dict[str, Any], dict[str, Any]]

# Settings of the strategy, module, its arguments, options of the Trainer.
CASES: dict[int, list[Case]] = {
    1: [({"context_parallel_degree": 1}, LayerSharded, {}, {})],
    2: [
        ({}, LayerSharded, {}, {}),
        ({"context_parallel_degree": 1}, LayerSharded, {}, {}),
        ({"attention": "ulysses", "layout": "contiguous"}, LayerSharded, {"causal": False}, {}),
        ({}, LayerSharded, {"recompute": True}, ACCUMULATED),
        ({}, BatchSharded, {}, {}),
        ({"attention": "ulysses", "layout": "contiguous"}, BatchSharded, {}, ACCUMULATED),
        ({"shard_size": 2}, LayerSharded, {}, ACCUMULATED),
        ({"shard_size": 2}, BatchSharded, {"recompute": True}, {}),
        ({"context_parallel_degree": 1, "shard_size": 1, "powersgd": FULL_RANK}, LayerSharded, {}, {}),
    ],
    4: [
        ({}, LayerSharded, {}, {}),
        ({"attention": "usp", "ulysses_degree": 2}, BatchSharded, {}, {}),
        ({"shard_size": 4}, LayerSharded, {}, {}),
        ({"context_parallel_degree": 2}, BatchSharded, {}, ACCUMULATED),
        ({"context_parallel_degree": 2, "shard_size": 2, "powersgd": FULL_RANK}, LayerSharded, {}, ACCUMULATED),
        ({"context_parallel_degree": 2, "shard_size": 4}, LayerSharded, {}, {}),
    ],
    8: [({"context_parallel_degree": 4, "shard_size": 4, "powersgd": FULL_RANK}, LayerSharded, {}, {})],
}


def _fit_cases(rank: int, world_size: int) -> list[Any]:
    return [
        fit_on_rank(rank, world_size, settings, module(**arguments), **options)
        for settings, module, arguments, options in CASES[world_size]
    ]


@functools.cache
def _alone(
    module: type[LayerSharded], arguments: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training on one process, in single precision and in double."""
    kind = Foreign if module is BatchSharded else module
    single, double = (
        fit_alone(made, **dict(options)) for made in (kind(**dict(arguments)), kind(**dict(arguments)).double())
    )
    return single, double


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_training_equals_that_of_one_process(world_size: int) -> None:
    by_rank = run_ranks(_fit_cases, world_size, world_size, timeout=280)
    for case, (settings, module, arguments, options) in enumerate(CASES[world_size]):
        # mypy takes a class with generic bases for unhashable.
        expected, exact = _alone(module, tuple(arguments.items()), tuple(options.items()))  # type: ignore[arg-type]
        answers = [answers[case] for answers in by_rank]
        name = f"{settings} {module.__name__} {arguments}"
        single, double = ({"losses": run["losses"], "state": flattened(run["state"])} for run in (expected, exact))
        for answer in answers:
            ours = {"losses": mean_losses(answers), "state": flattened(answer["state"])}
            assert_only_rounded({name: ours}, {name: single}, {name: double})
            assert answer["losses"][0] > answer["losses"][-1]
        size = settings.get("context_parallel_degree", world_size)
        assert [answer["sampler"] for answer in answers] == [
            {"num_replicas": world_size // size, "rank": rank // size} for rank in range(world_size)
        ]
