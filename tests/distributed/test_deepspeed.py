"""The text-to-image module under Lightning's DeepSpeed strategies, where the extra `deepspeed` is installed.

The first run compiles DeepSpeed's messages between processes of one machine, which takes minutes.
"""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTrainingConfig
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.unit.lightning_modules.tiny_text_to_image import CAPTIONS, TRAINER, images, tiny_module

pytestmark = [
    *LIGHTNING_WARNINGS,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"),
    pytest.mark.timeout(1800),
]
TRAINING = TextToImageTrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.96, weight_decay=4.5e-2),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=30),
)
UPDATES, BATCH = 6, 4


class _OnTheCPU(DeepSpeedStrategy):
    """Lightning's own strategy, without its check for CUDA devices."""

    @property
    def root_device(self) -> torch.device:
        # The engine asks for a number.
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class _Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def _train(rank: int, world_size: int, **options: Any) -> list[float]:
    share = BATCH // world_size
    rows: list[dict[str, Tensor | str]] = []
    for number, image in enumerate(images(UPDATES * BATCH)):
        if number % BATCH // share == rank:
            rows.append({"image": image, "caption": CAPTIONS[0]})
    losses = _Losses()
    trainer = Trainer(
        **TRAINER,
        **options,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        callbacks=[losses],
    )
    loader: DataLoader[Any] = DataLoader(rows, batch_size=share)  # type: ignore[arg-type]
    trainer.fit(tiny_module(training=TRAINING), loader, loader)
    return losses.seen


def _train_sharded(rank: int, world_size: int, stage: int) -> list[float]:
    os.environ["LOCAL_RANK"] = str(rank)
    return _train(rank, world_size, devices=world_size, strategy=_OnTheCPU(stage=stage, process_group_backend="gloo"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_text_to_image_module_trains_as_on_one_process(stage: int) -> None:
    torch.set_num_threads(1)
    alone = _train(0, 1, devices=1)
    ranks = run_ranks(_train_sharded, 2, 2, stage, timeout=1500)
    mean = [sum(losses) / len(ranks) for losses in zip(*ranks, strict=True)]
    # Single precision, and sums in another order.
    assert mean == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]
