"""Every Trainer method under the strategy, checkpoints, random numbers, metrics, refusals."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dalle import ContextGroups, ContextParallelSession, ContextParallelStrategy, SequencePlan
from lightning_dalle.callbacks import ContextParallelMonitor
from lightning_dalle.distributed.gradients import MeanGradients
from tests.distributed.language_model import (
    HEADS,
    LENGTH,
    SAMPLES,
    WIDTH,
    BatchSharded,
    Foreign,
    LayerSharded,
    batches,
    fit_alone,
    fit_on_rank,
    mean_losses,
)
from tests.distributed.toy_module import Toy, trainer_of
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.rounding import FACTOR, assert_only_rounded, rounding_bar

pytestmark = LIGHTNING_WARNINGS


def _every_method(rank: int, state: dict[str, Tensor]) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    answers = []
    for module in (LayerSharded(), BatchSharded()):
        module.load_state_dict(state)
        trainer = trainer_of(2, "context_parallel", limit_val_batches=2)
        loader = batches(3, 0, 1)
        validated = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
        tested = trainer.test(module, loader, verbose=False)[0]["val_loss"]
        predicted: Any = trainer.predict(module, loader)
        answers.append((validated, tested, torch.stack(predicted)))
        # Nothing of the strategy is left in the module.
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return answers


def test_validate_test_and_predict() -> None:
    state = LayerSharded(seed=3).state_dict()
    by_rank = run_ranks(_every_method, 2, state, timeout=120)
    for case, kind in enumerate((LayerSharded, Foreign)):
        alone = kind()
        alone.load_state_dict(state)
        expected: list[dict[str, Any]] = []
        for dtype in (torch.float32, torch.float64):
            alone.to(dtype)
            with torch.inference_mode():
                predicted = torch.stack([alone(batch) for batch in batches(3, 0, 1)])
                losses = [float(alone.loss(batch)) for batch in batches(3, 0, 1)]
            expected.append({"logits": predicted, "losses": [sum(losses[:2]) / 2, sum(losses) / 3]})
        for validated, tested, logits in (answers[case] for answers in by_rank):
            assert_only_rounded({"logits": logits, "losses": [validated, tested]}, *expected)


def _save(rank: int, folder: Path, settings: dict[str, Any]) -> Any:
    keep = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep]}
    return fit_on_rank(rank, 2, settings, LayerSharded(), num_batches=10, **options)


def _resume(rank: int, world_size: int, file: Path, cases: list[dict[str, Any]]) -> Any:
    return [
        fit_on_rank(rank, world_size, settings, LayerSharded(seed=5), num_batches=5, start=5, ckpt_path=str(file))
        for settings in cases
    ]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("shards", [False, True])
def test_training_goes_on_at_another_context_parallel_degree(tmp_path: Path, shards: bool) -> None:
    first = run_ranks(_save, 2, tmp_path, {"shard_size": 2} if shards else {}, timeout=120)
    file = tmp_path / "step=5.ckpt"
    assert file.is_dir() == shards
    expected = [fit_alone(module, num_batches=10)["losses"][5:] for module in (LayerSharded(), LayerSharded().double())]
    assert_only_rounded(first[0]["losses"][5:], *expected)
    for world_size, degrees in ((2, (1, 2)), (4, (4,))):
        cases = [
            {"context_parallel_degree": degree, "shard_size": world_size if shards else None} for degree in degrees
        ]
        by_rank = run_ranks(_resume, world_size, world_size, file, cases, timeout=120)
        for case in range(len(cases)):
            losses = mean_losses([answers[case] for answers in by_rank])
            assert_only_rounded(losses, *expected)
    if not shards:
        # An ordinary file, which Lightning alone goes on from too.
        alone = LayerSharded(seed=5)
        loader = batches(5, 0, 1, start=5)
        trainer_of(1, "auto").fit(alone, loader, loader, ckpt_path=str(file))
        assert_only_rounded(alone.losses, *expected)


def _with_dropout(rank: int, world_size: int, cases: list[dict[str, Any]]) -> Any:
    # Processes come with random numbers of their own.
    losses = []
    for settings in cases:
        module = LayerSharded(dropout=0.3, recompute=True)
        torch.manual_seed(rank)
        losses.append(fit_on_rank(rank, world_size, settings, module, num_batches=4)["losses"])
    return losses


def test_dropout_does_not_depend_on_the_number_of_ranks() -> None:
    (expected,) = run_ranks(_with_dropout, 1, 1, [{}])[0]
    cases: list[dict[str, Any]] = [{}, {"attention": "ulysses", "layout": "contiguous"}]
    without, exact = (
        fit_alone(module, num_batches=4)["losses"] for module in (LayerSharded(), LayerSharded().double())
    )
    # Both runs round as one without dropout does, of which the double one is known.
    bar = rounding_bar(torch.tensor(without), torch.tensor(exact, dtype=torch.float64), factor=2 * FACTOR)
    for losses in run_ranks(_with_dropout, 2, 2, cases, timeout=120):
        assert losses == [pytest.approx(expected, abs=bar)] * 2
    assert without != pytest.approx(expected, abs=1e-2)


class _Collectives(TorchDispatchMode):
    """Records the collectives that this process calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _collectives(rank: int) -> Any:
    with _Collectives() as collectives:
        for attention in ("ring", "ulysses"):
            answer = fit_on_rank(
                rank, 2, {"attention": attention, "layout": "contiguous"}, BatchSharded(), num_batches=3
            )
    return collectives.names, answer["metrics"]


def test_collectives_come_in_one_order_though_one_rank_has_all_labels() -> None:
    (first, _), (second, _) = run_ranks(_collectives, 2, timeout=120)
    assert first == second
    assert {"c10d::alltoall_base_", "c10d::allreduce_", "c10d::send"} <= set(first)


def _metrics(rank: int) -> Any:
    options: dict[str, Any] = {"log_every_n_steps": 3, "logger": False, "callbacks": [ContextParallelMonitor()]}
    return fit_on_rank(rank, 2, {}, BatchSharded(), num_batches=3, **options)["metrics"]


def test_monitor_logs_what_a_step_sent_and_waited() -> None:
    by_rank = run_ranks(_metrics, 2, timeout=120)
    # Two layers: keys and values of the other rank forward, they and their gradients backward.
    total = sum(metrics["context_parallel/bytes_sent"] for metrics in by_rank)
    assert total == pytest.approx(2 * (2 + 4) * SAMPLES * LENGTH * WIDTH * 4, rel=1e-6)
    for metrics in by_rank:
        assert metrics["context_parallel/computing_seconds"] > 0
        assert metrics["context_parallel/waiting_seconds"] > 0
        assert 0 <= metrics["context_parallel/overlap_ratio"] <= 1
        assert metrics["context_parallel/imbalance"] == pytest.approx(by_rank[0]["context_parallel/imbalance"])
        assert metrics["context_parallel/imbalance"] >= 0


class _PositionsOfRanks(BatchSharded):
    """Mistake: positions of each rank begin at 0."""

    def number(self, batch: Any) -> Tensor:
        return torch.arange(batch["tokens"].shape[1])


class _WithoutMean(ContextParallelStrategy):
    """Mistake: gradients are not averaged."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        alone = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
        assert isinstance(alone, distributed.ProcessGroup)
        self.gradients = MeanGradients(alone)


def _mistakes(rank: int) -> Any:
    answers = [fit_on_rank(rank, 2, {}, _PositionsOfRanks(), num_batches=6)["losses"]]
    os.environ["LOCAL_RANK"] = str(rank)
    module = LayerSharded()
    trainer_of(2, _WithoutMean()).fit(module, batches(6, 0, 1))
    return [*answers, module.losses]


def test_mistakes_would_be_seen() -> None:
    expected = [fit_alone(module(), num_batches=6)["losses"] for module in (Foreign, LayerSharded)]
    for losses in run_ranks(_mistakes, 2, timeout=120):
        for wrong, right in zip(losses, expected, strict=True):
            assert wrong != pytest.approx(right, abs=1e-3)


class _OwnMean(BatchSharded):
    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch).flatten(0, 1), batch["tokens"].flatten())


class _Inattentive(LayerSharded):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda hidden: hidden * 1.0


class _ShardsItself(LayerSharded):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.trainer.strategy.shard_mesh)  # type: ignore[attr-defined]


LAYERS: dict[str, Any] = {"inputs": {"layers.0": {"hidden": 1}}, "outputs": {"layers.1": 1}}
REFUSALS: list[tuple[dict[str, Any], type[Any], type[Exception], str]] = [
    (
        {"context_parallel_degree": 3},
        LayerSharded,
        ValueError,
        r"context_parallel_degree \(3\) must divide the number of processes \(2\)",
    ),
    (
        {"shard_size": 1},
        LayerSharded,
        ValueError,
        r"shard_size \(1\) must be a multiple of context_parallel_degree \(2\)",
    ),
    (
        {"attention": "usp", "ulysses_degree": 3},
        LayerSharded,
        ValueError,
        r"ulysses_degree \(3\) must divide context_parallel_degree \(2\)",
    ),
    (
        {"attention": "ulysses", "plan": SequencePlan(**LAYERS, num_heads=3)},
        LayerSharded,
        ValueError,
        r"num_heads \(3\) must be divisible by the 2 processes that trade heads; use attention='usp'",
    ),
    (
        {"plan": SequencePlan(**LAYERS, length=3)},
        LayerSharded,
        ValueError,
        r"length \(3\) must be at least 4, the runs",
    ),
    ({}, Toy, TypeError, "Toy has no method sequence_plan"),
    (
        {"plan": SequencePlan(batch={"words": 1})},
        LayerSharded,
        ValueError,
        r"the plan shards \['words'\] of each batch",
    ),
    ({}, _OwnMean, RuntimeError, "training_step returned a loss of local positions alone"),
    ({}, _Inattentive, RuntimeError, "sequences were sharded, but neither attend nor scaled_dot_product_attention"),
    ({}, _ShardsItself, ValueError, "_ShardsItself shards its parameters, but shard_size is None"),
]


def _refusals(rank: int) -> int:
    os.environ["LOCAL_RANK"] = str(rank)
    for settings, module, kind, message in REFUSALS:
        with pytest.raises(kind, match=message):
            trainer_of(2, ContextParallelStrategy(**settings)).fit(module(), batches(1, 0, 1))
    with pytest.raises(ValueError, match="different batches"):
        trainer_of(2, "context_parallel").fit(LayerSharded(), batches(1, 0, 1, start=rank))
    world = distributed.group.WORLD
    session = ContextParallelSession(SequencePlan(batch={"tokens": 1}), ContextGroups(world, ring=world))
    session.shard({"tokens": torch.zeros(1, LENGTH)}, {"tokens": 1})
    with pytest.raises(ValueError, match=rf"{LENGTH} positions along dim 1"):
        session.gather(torch.zeros(1, LENGTH), 1)
    return HEADS


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    assert run_ranks(_refusals, 2, timeout=120) == [HEADS] * 2
