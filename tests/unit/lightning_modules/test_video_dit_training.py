"""Settings, optimizer and learning rate of the video training."""

import dataclasses
from typing import Any

import pytest
from torch import nn

from lightning_dalle.lightning_modules.video_dit_training import (
    VideoDiTTrainingConfig,
    build_optimizer,
    build_scheduler,
)

TRAINING = VideoDiTTrainingConfig(clip_size=(4, 8, 8), learning_rate=0.5, warmup_steps=3, weight_decay=0.1)


def _rates(training: VideoDiTTrainingConfig, updates: int) -> list[float]:
    optimizer = build_optimizer(nn.Linear(1, 1), training)
    scheduler = build_scheduler(optimizer, training)["scheduler"]
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_learning_rate_warms_up_and_stays_or_falls_to_zero() -> None:
    assert _rates(TRAINING, 6) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    falling = _rates(dataclasses.replace(TRAINING, total_steps=7), 9)
    assert falling[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert falling[5] == pytest.approx(0.25)
    assert falling[7:] == [0, 0]


def test_weight_decay_spares_gains_biases_embeddings_and_what_is_frozen() -> None:
    network = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4).requires_grad_(False))
    decayed, spared = build_optimizer(network, TRAINING).param_groups
    assert [parameter.shape for parameter in decayed["params"]] == [(4, 4)]
    assert decayed["weight_decay"] == 0.1
    assert len(spared["params"]) == 4
    assert spared["weight_decay"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_size": (4, 8)}, r"clip_size \(4, 8\) must be frames, height and width"),
        ({"clip_size": (4, 8, 0)}, r"clip_size \(4, 8, 0\) must be"),
        ({"learning_rate": 0.0}, r"learning_rate \(0.0\) must be positive"),
        ({"shift": -1.0}, r"shift \(-1.0\) must be positive"),
        ({"warmup_steps": -1}, r"warmup_steps \(-1\) must be at least 0"),
        ({"beta2": 1.0}, r"beta2 \(1.0\) must be in \[0, 1\)"),
        ({"caption_dropout": 1.5}, r"caption_dropout \(1.5\) must be in \[0, 1\]"),
        ({"first_frame_share": -0.5}, r"first_frame_share \(-0.5\)"),
        ({"time_density": "normal"}, r"time_density \('normal'\) must be 'uniform' or 'logit_normal'"),
        ({"total_steps": 3}, r"total_steps \(3\) must exceed warmup_steps \(3\)"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TRAINING, **changes)
