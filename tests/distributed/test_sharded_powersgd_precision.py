"""Compressed gradients under mixed precision."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.plugins import PerBlockGradientScaling
from lightning_dalle.strategies import MeshStrategy
from tests.distributed.toy_module import Block, Toy, batches, powersgd_strategy, trainer_of, whole_state
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
SPOILED_BATCH = 2


class _Scaled(Toy):
    """The gradient of a whole batch is not finite, on one rank."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        spoiled = self.global_rank == 1 and batch_idx == SPOILED_BATCH
        return loss * torch.nan if spoiled else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(whole_state(self))


def _run(rank: int, world_size: int, shard_size: int, plugin: str) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(0)
    module = _Scaled() if plugin == "scaled" else Toy(torch.float32)
    strategy = powersgd_strategy(shard_size=shard_size, matrix_approximation_rank=2, min_compression_rate=1.0)
    scaling = PerBlockGradientScaling(Block, "float16", initial_scale=2.0**8)
    options: dict[str, Any] = {"plugins": scaling} if plugin == "scaled" else {"precision": plugin}
    trainer = trainer_of(world_size, strategy, gradient_clip_val=1.0, **options)
    loader = batches(8, rank, world_size, torch.float32)
    trainer.fit(module, loader, loader)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    return {
        "losses": module.losses,
        "state": whole_state(module),
        "scales": scaling.loss_scales(),
        "skipped": (scaling.num_skipped_updates, strategy.gradients.skipped_steps),
        "seen": getattr(module, "seen", []),
    }


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 1), (4, 2)])
def test_scale_per_block_and_compression_skip_together(world_size: int, shard_size: int) -> None:
    by_rank = run_ranks(_run, world_size, world_size, shard_size, "scaled", timeout=120)
    plain = run_ranks(_run, world_size, world_size, shard_size, "32-true", timeout=120)
    for answer in by_rank:
        assert answer["skipped"] == (1, 1)
        assert answer["scales"] == by_rank[0]["scales"]
        torch.testing.assert_close(answer["state"], by_rank[0]["state"], rtol=0, atol=0)
        torch.testing.assert_close(answer["seen"][SPOILED_BATCH], answer["seen"][SPOILED_BATCH - 1], rtol=0, atol=0)
        assert not torch.equal(answer["seen"][SPOILED_BATCH + 1]["gain"], answer["seen"][SPOILED_BATCH]["gain"])
    # Up to the skip, rounding to ten bits is all that differs.
    for answer, other in zip(by_rank, plain, strict=True):
        assert answer["losses"][: SPOILED_BATCH + 1] == pytest.approx(other["losses"][: SPOILED_BATCH + 1], rel=5e-3)


def test_bfloat16_trains_as_float32_does() -> None:
    mixed = run_ranks(_run, 2, 2, 2, "bf16-mixed", timeout=120)
    plain = run_ranks(_run, 2, 2, 2, "32-true", timeout=120)
    for answer, other in zip(mixed, plain, strict=True):
        assert answer["losses"] == pytest.approx(other["losses"], rel=5e-2)


def _with_one_scale(rank: int, strategy: MeshStrategy, module: Toy, num_batches: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    loader = batches(num_batches, rank, 2, torch.float32)
    trainer_of(2, strategy, plugins=plugin, gradient_clip_val=1.0).fit(module, loader, loader)


def _one_scale_and_error_feedback(rank: int) -> None:
    with pytest.raises(ValueError, match="scales the whole loss"):
        _with_one_scale(rank, powersgd_strategy(shard_size=1, min_compression_rate=1.0), Toy(torch.float32), 1)


def test_one_scale_for_the_whole_loss_is_refused_where_there_is_error_feedback() -> None:
    run_ranks(_one_scale_and_error_feedback, 2, timeout=120)


ONE_SCALE: dict[str, MeshStrategy] = {
    "compressed, without error feedback": powersgd_strategy(
        shard_size=1, matrix_approximation_rank=2, min_compression_rate=1.0, error_feedback=False
    ),
    "one replica, so that nothing is compressed": powersgd_strategy(shard_size=2),
    "replicated": MeshStrategy(),
    "sharded": MeshStrategy(shard_size=2),
}


def _one_scale(rank: int, case: str) -> Any:
    module = _Scaled()
    _with_one_scale(rank, ONE_SCALE[case], module, 8)
    return module.seen


@pytest.mark.parametrize("case", ONE_SCALE)
def test_one_scale_for_the_whole_loss_skips_the_step_on_all_ranks(case: str) -> None:
    first, second = run_ranks(_one_scale, 2, case, timeout=120)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first[SPOILED_BATCH], first[SPOILED_BATCH - 1], rtol=0, atol=0)
    assert not torch.equal(first[SPOILED_BATCH + 1]["gain"], first[SPOILED_BATCH]["gain"])
