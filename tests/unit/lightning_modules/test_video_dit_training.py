"""Settings of the video training."""

import dataclasses
from typing import Any

import pytest

from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTrainingConfig

TRAINING = VideoDiTTrainingConfig(clip_size=(4, 8, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_size": (4, 8)}, r"clip_size \(4, 8\) must be frames, height and width"),
        ({"clip_size": (4, 8, 0)}, r"clip_size \(4, 8, 0\) must be"),
        ({"shift": -1.0}, r"shift \(-1.0\) must be positive"),
        ({"caption_dropout": 1.5}, r"caption_dropout \(1.5\) must be in \[0, 1\]"),
        ({"first_frame_share": -0.5}, r"first_frame_share \(-0.5\)"),
        ({"time_density": "normal"}, r"time_density \('normal'\) must be 'uniform' or 'logit_normal'"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TRAINING, **changes)
