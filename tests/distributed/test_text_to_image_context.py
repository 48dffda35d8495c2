"""The text-to-image module under the strategy, as it is, against one process."""

import dataclasses
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dalle import ContextParallelStrategy, TextToImageModule
from tests.distributed.toy_module import trainer_of
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.rounding import assert_only_rounded
from tests.unit.lightning_modules.tiny_text_to_image import NETWORK, TRAINING, loader, tiny_module

pytestmark = LIGHTNING_WARNINGS
CASES: list[dict[str, Any]] = [
    {},
    {"attention": "ulysses", "layout": "contiguous"},
    {"shard_size": 2},
]

LOSSES: list[float] = []
LOGITS: dict[str, int] = {}


class _Recorded(TextToImageModule):
    def training_step(self, *args: Any) -> Any:
        handles = [
            getattr(self.network, name).register_forward_hook(partial(_count_logits, name))
            for name in ("text_head", "image_head")
        ]
        loss = super().training_step(*args)
        for handle in handles:
            handle.remove()
        LOSSES.append(loss.item())
        return loss


def _count_logits(name: str, _: nn.Module, args: Any, logits: Tensor) -> None:
    LOGITS[name] = logits.shape[1]


def _fit(strategy: Any, devices: int, double: bool = False) -> dict[str, Any]:
    # Row, column and convolution, with dropout, and random disturbances keyed by the share of the data.
    network = dataclasses.replace(NETWORK, attention_dropout=0.1, activation_checkpointing=True)
    training = dataclasses.replace(TRAINING, image_token_noise=0.2)
    module = tiny_module(network=network, training=training)
    module.__class__ = _Recorded
    if double:
        module.network.double()
    LOSSES.clear()
    torch.manual_seed(1)
    trainer = trainer_of(devices, strategy, limit_val_batches=1)
    trainer.fit(module, loader(5), loader(1))
    validated = float(trainer.callback_metrics["val/loss"])
    predicted: Any = trainer.predict(module, loader(1))
    return {"losses": list(LOSSES), "validated": validated, "predicted": predicted[0], "logits": dict(LOGITS)}


def _fit_on_rank(rank: int) -> list[dict[str, Any]]:
    os.environ["LOCAL_RANK"] = str(rank)
    return [_fit(ContextParallelStrategy(**settings), 2) for settings in CASES]


def test_text_to_image_trains_as_on_one_process() -> None:
    expected, exact = _fit("auto", 1), _fit("auto", 1, double=True)
    by_rank = run_ranks(_fit_on_rank, 2, timeout=120)
    for answers in by_rank:
        for answer in answers:
            for name in ("losses", "validated"):
                assert_only_rounded({name: answer[name]}, {name: expected[name]}, {name: exact[name]})
            assert torch.equal(answer["predicted"], expected["predicted"])
    # Each position's logits are computed by one rank.
    for first, second in zip(*by_rank, strict=True):
        sums = {name: number + second["logits"][name] for name, number in first["logits"].items()}
        assert sums == expected["logits"] == {"text_head": NETWORK.text_tokens, "image_head": NETWORK.image_tokens}
        assert first["logits"]["image_head"] > 0
        assert second["logits"]["image_head"] > 0
