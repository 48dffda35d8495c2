"""Settings that do not fit each other."""

from typing import Any

import pytest

from lightning_dalle.distributed.context_parallel.plan import ContextParallelConfig, SequencePlan


def test_plan_that_shards_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch and inputs are both empty"):
        SequencePlan(outputs={"last": 1})


@pytest.mark.parametrize(
    ("settings", "degree", "ulysses_degree"),
    [
        ({}, 4, 1),
        ({"attention": "ulysses"}, 4, 4),
        ({"attention": "usp", "ulysses_degree": 2}, 4, 2),
    ],
)
def test_attention_decides_how_many_processes_trade_heads(
    settings: dict[str, Any], degree: int, ulysses_degree: int
) -> None:
    assert ContextParallelConfig(**settings).ulysses_degree_of(degree) == ulysses_degree


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"degree": 0}, "context_parallel_degree"),
        ({"attention": "megatron"}, "attention"),
        ({"attention": "usp"}, "ulysses_degree"),
        ({"attention": "ring", "ulysses_degree": 2}, "ulysses_degree"),
        ({"layout": "striped"}, "layout"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        ContextParallelConfig(**settings)


def test_ulysses_degree_must_divide_the_context() -> None:
    with pytest.raises(ValueError, match=r"ulysses_degree \(3\) must divide context_parallel_degree \(4\)"):
        ContextParallelConfig(attention="usp", ulysses_degree=3).ulysses_degree_of(4)
