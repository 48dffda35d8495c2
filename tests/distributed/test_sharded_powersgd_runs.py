"""Every Trainer method under the strategy, skipped steps, metrics, late parameters, refusals."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_dalle.callbacks import PowerSGDMonitor
from lightning_dalle.distributed.hsdp import is_sharded
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.strategies import MeshStrategy, ShardedPowerSGDStrategy
from tests.distributed.toy_module import Toy, batches, powersgd_strategy, trainer_of, whole_state, whole_tensors
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS


def _every_method(rank: int, world_size: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = Toy()
    trainer = trainer_of(world_size, "sharded_powersgd", limit_val_batches=2, num_sanity_val_steps=1, max_epochs=2)
    loader = batches(4, rank, world_size, torch.float64)
    trainer.fit(module, loader, loader)
    fitted = float(trainer.callback_metrics["val_loss"])
    validated = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    tested = trainer.test(module, loader, verbose=False)[0]["val_loss"]
    predicted: Any = trainer.predict(module, loader)
    # Another Trainer takes the module over as it is.
    again = trainer_of(world_size, "sharded_powersgd", limit_val_batches=2).validate(module, loader, verbose=False)
    return fitted, validated, tested, torch.stack(predicted), again[0]["val_loss"], whole_state(module)


def test_fit_validate_test_and_predict() -> None:
    by_rank = run_ranks(_every_method, 2, 2, timeout=120)
    whole = Toy()
    whole.load_state_dict(by_rank[0][-1])
    with torch.inference_mode():
        expected = torch.stack([whole(inputs) for inputs, _ in batches(4, 0, 1, torch.float64)])
    torch.testing.assert_close(torch.cat([answer[3] for answer in by_rank], dim=1), expected)
    for fitted, validated, tested, _, again, _ in by_rank:
        assert fitted == validated == again
        assert tested != validated


class _Spoiled(Toy):
    """Its third gradient is not finite on one rank."""

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.spoil = spoil
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.spoil and batch_idx == 2 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(whole_state(self) | self._moments())

    def _moments(self) -> dict[str, Tensor]:
        optimizer = self.trainer.optimizers[0]
        return whole_tensors(
            {
                f"{number}.{name}": value
                for number, state in enumerate(optimizer.state.values())
                for name, value in state.items()
                if name != "step"
            }
        )


def _spoiled_run(rank: int, world_size: int, shard_size: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = _Spoiled(spoil=rank == 1)
    strategy = powersgd_strategy(shard_size=shard_size, matrix_approximation_rank=2, min_compression_rate=1.0)
    trainer = trainer_of(world_size, strategy, gradient_clip_val=1.0)
    loader = batches(5, rank, world_size, torch.float64)
    trainer.fit(module, loader, loader)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    return module.seen, strategy.gradients.skipped_steps


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 1), (2, 2), (4, 2)])
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world_size: int, shard_size: int) -> None:
    for seen, skipped in run_ranks(_spoiled_run, world_size, world_size, shard_size, timeout=120):
        assert skipped == 1
        torch.testing.assert_close(seen[2], seen[1], rtol=0, atol=0)
        assert not torch.equal(seen[3]["last.weight"], seen[2]["last.weight"])
        assert all(value.isfinite().all() for value in seen[4].values())


class _Own(Toy):
    """Shards its blocks, leaves the rest to the strategy, and names what is not to be compressed."""

    def configure_model(self) -> None:
        if not hasattr(self, "sharded"):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["shard"])
            self.sharded = True

    def uncompressed_parameters(self) -> list[str]:
        return ["blocks.0.*"]


def _own_plan(rank: int, world_size: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = _Own()
    strategy = powersgd_strategy(
        shard_size=2, matrix_approximation_rank=99, min_compression_rate=0.0, exclude=["blocks.1.fc1.weight"]
    )
    trainer = trainer_of(
        world_size, strategy, gradient_clip_val=0.1, log_every_n_steps=1, callbacks=[PowerSGDMonitor()]
    )
    loader = batches(6, rank, world_size, torch.float64)
    trainer.fit(module, loader, loader)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    plan = {matrix.name for matrix in strategy.gradients.compressor.plan.matrices}
    return whole_state(module), plan, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_module_that_shards_itself_and_names_exceptions() -> None:
    by_rank = run_ranks(_own_plan, 4, 4, timeout=120)
    alone = Toy()
    loader = batches(6, 0, 1, torch.float64)
    trainer_of(1, "auto", gradient_clip_val=0.1).fit(alone, loader, loader)
    for state, plan, metrics in by_rank:
        torch.testing.assert_close(state, whole_state(alone), rtol=1e-9, atol=1e-10)
        in_blocks = {"blocks.1.fc2.weight", "blocks.2.fc1.weight", "blocks.2.fc2.weight"}
        # The strategy has sharded what the module left, and compresses it too.
        assert plan == in_blocks | {"first.weight", "tied.weight", "unused.weight", "last.weight"}
        assert metrics["powersgd/skipped_steps"] == 0
        assert metrics["powersgd/reconstruction_error/blocks.*.fc1.weight"] < 1e-6
        # Replicas keep what they differ by; it adds up to nothing.
        assert metrics["powersgd/error_feedback_norm"] > 0
        # At full rank P and Q are larger than the matrices.
        assert metrics["powersgd/bytes_saved"] < 0 < metrics["powersgd/bytes_sent"]


def _differently_drawn(rank: int, shard_size: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = Toy(seed=rank)
    strategy = powersgd_strategy(shard_size=shard_size, matrix_approximation_rank=99, min_compression_rate=0.0)
    trainer = trainer_of(2, strategy, log_every_n_steps=1, callbacks=[PowerSGDMonitor()])
    loader = batches(3, rank, 2, torch.float64)
    trainer.fit(module, loader, loader)
    return whole_state(module), is_sharded(module), sorted(trainer.callback_metrics)


@pytest.mark.parametrize("shard_size", [1, 2])
def test_all_start_with_the_parameters_of_rank_0_and_shards_of_one_process_are_plain_tensors(shard_size: int) -> None:
    alone = Toy(seed=0)
    loader = batches(3, 0, 1, torch.float64)
    trainer_of(1, "auto").fit(alone, loader, loader)
    for state, sharded, names in run_ranks(_differently_drawn, 2, shard_size, timeout=120):
        torch.testing.assert_close(state, whole_state(alone), rtol=1e-9, atol=1e-10)
        assert sharded == (shard_size > 1)
        # One replica compresses nothing, and nothing is logged of it.
        assert bool(names) == (shard_size == 1)


class _Measured(Toy):
    """Counts bytes of error-feedback buffers and of compressed gradients after each backward pass and each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []

    def on_after_backward(self) -> None:
        self._count()

    def on_train_batch_end(self, *_: Any) -> None:
        self._count()

    def _count(self) -> None:
        gradients = self.trainer.strategy.gradients  # type: ignore[attr-defined]
        compressed = [gradients.parameters[matrix.name].grad for matrix in gradients.compressor.plan.matrices]
        in_gradients = sum(8 * gradient.numel() for gradient in compressed if gradient is not None)
        self.counts.append((gradients.compressor.error_feedback.num_bytes, in_gradients))


def _measured_run(rank: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = _Measured()
    trainer = trainer_of(
        2,
        powersgd_strategy(shard_size=1, matrix_approximation_rank=1, min_compression_rate=1.0),
        accumulate_grad_batches=2,
    )
    loader = batches(6, rank, 2, torch.float64)
    trainer.fit(module, loader, loader)
    return module.counts


def test_error_feedback_and_gradient_share_one_buffer() -> None:
    for counts in run_ranks(_measured_run, 2, timeout=120):
        size = counts[0][1]
        assert size > 0
        # The second batch of each step ends with the error-feedback buffers alone.
        assert counts == [(0, size), (0, size), (0, size), (size, 0)] * 3


class _Plain(LightningModule):
    """Has no matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (batch[0] * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _no_matrices(rank: int, world_size: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = _Plain()
    trainer_of(world_size, ShardedPowerSGDStrategy(shard_size=1)).fit(
        module, batches(3, rank, world_size, torch.float32)
    )
    return whole_state(module)["scale"]


def test_module_without_matrices() -> None:
    alone = _Plain()
    trainer_of(1, "auto").fit(alone, batches(3, 0, 1, torch.float32))
    for scale in run_ranks(_no_matrices, 2, 2, timeout=120):
        torch.testing.assert_close(scale, alone.scale.detach())


class _UnfreezesLate(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.last.requires_grad_(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(True)


class _OptimizesLate(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.last.parameters(), lr=3e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": [*self.blocks.parameters()]})


class _GrowsLate(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.grown = nn.Parameter(torch.ones(3))
            self.trainer.optimizers[0].add_param_group({"params": [self.grown]})


def _late(rank: int, strategies: dict[str, MeshStrategy], kind: type[Toy]) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    states = {}
    for name, strategy in strategies.items():
        module = kind()
        loader = batches(6, rank, 2, torch.float64)
        trainer_of(2, strategy).fit(module, loader, loader)
        states[name] = whole_state(module)
    return states


LATE = {
    "replicated": MeshStrategy(),
    "sharded": MeshStrategy(shard_size=2),
    "compressed": powersgd_strategy(shard_size=1, matrix_approximation_rank=99, min_compression_rate=0.0),
}


@pytest.mark.parametrize("kind", [_UnfreezesLate, _OptimizesLate])
def test_parameters_that_train_from_later_on_are_averaged_too(kind: type[Toy]) -> None:
    alone = kind()
    loader = batches(6, 0, 1, torch.float64)
    trainer_of(1, "auto").fit(alone, loader, loader)
    for states in run_ranks(_late, 2, LATE, kind, timeout=240):
        for name in LATE:
            torch.testing.assert_close(states[name], whole_state(alone), rtol=1e-9, atol=1e-10, msg=name)


def _grown(rank: int) -> None:
    with pytest.raises(ValueError, match="grown is not sharded, though other parameters are"):
        _late(rank, {"sharded": MeshStrategy(shard_size=2)}, _GrowsLate)


def test_parameter_that_is_made_after_sharding_is_refused_by_name() -> None:
    run_ranks(_grown, 2, timeout=120)


class _OneExpertEach(Toy):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(self.blocks[1 + self.global_rank](self.blocks[0](hidden)))


def _one_expert_each(rank: int) -> None:
    with pytest.raises(RuntimeError, match="blocks.1.norm.weight has a gradient on some processes of its replica only"):
        _late(rank, {"sharded": MeshStrategy(shard_size=2)}, _OneExpertEach)


def test_processes_of_a_replica_that_use_different_parameters_are_refused() -> None:
    run_ranks(_one_expert_each, 2, timeout=120)


class _ByHand(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _OverTheWholeMesh(Toy):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["replicate", "shard"])


REFUSALS: list[tuple[dict[str, Any], type[Toy], str]] = [
    ({"shard_size": 3}, Toy, r"shard_size \(3\) must divide the number of processes \(2\)"),
    (
        {"total_matrix_approximation_rank": 3},
        Toy,
        r"total_matrix_approximation_rank \(3\) must be a multiple of the number of shards \(2\)",
    ),
    ({}, _ByHand, "_ByHand has automatic_optimization=False"),
    ({}, _OverTheWholeMesh, r"which must be the strategy's shard_mesh"),
    ({"exclude": ["nothing"]}, Toy, "pattern 'nothing' matches no parameter"),
]


def _refusals(rank: int) -> int:
    os.environ["LOCAL_RANK"] = str(rank)
    loader = batches(1, rank, 2, torch.float64)
    for settings, module, message in REFUSALS:
        with pytest.raises(ValueError, match=message):
            trainer_of(2, powersgd_strategy(**settings)).fit(module(), loader, loader)
    return len(REFUSALS)


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    assert run_ranks(_refusals, 2, timeout=120) == [len(REFUSALS)] * 2
