from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_dalle.callbacks.motion_curve import MotionCurve
from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.data.moving_shapes.motions import draw_motion, parse_motion, place_motion
from lightning_dalle.quickstart.settings import Sampling
from lightning_dalle.quickstart.video_scores import evaluate_moving_shapes
from tests.unit.quickstart.fakes import FakeTextToImage

CLIP_SHAPE = (8, 32, 32)
SAMPLING = Sampling(num_prompts=6, num_candidates=2, guidance_scale=1.5)


@pytest.fixture(scope="module")
def data() -> MovingShapesDataModule:
    return MovingShapesDataModule(num_train=20, num_val=20)


def right_clip(caption: str) -> np.ndarray:
    motion = parse_motion(caption)
    return draw_motion(motion, place_motion(motion, *CLIP_SHAPE, np.random.default_rng(0)), *CLIP_SHAPE)


def still_clip(caption: str) -> np.ndarray:
    return np.repeat(right_clip(caption)[:, :1], CLIP_SHAPE[0], axis=1)


def values(evaluation: Any) -> dict[str, float]:
    return {metric.key: metric.value for metric in evaluation.metrics}


def test_right_clips_are_all_right(data: MovingShapesDataModule) -> None:
    module = FakeTextToImage(right_clip, [0, 1])
    evaluation = evaluate_moving_shapes(module, data, SAMPLING)  # type: ignore[arg-type]
    metrics = values(evaluation)
    for name in ("colour", "shape", "axis", "direction", "speed", "all"):
        assert metrics[f"oracle_{name}"] == 1
    assert 0.5 < metrics["motion_ratio"] < 2
    assert evaluation.prompts[0].correct.all()
    assert set(module.calls[0]["captions"]) <= set(data.held_out_captions())
    assert module.calls[0]["guidance_scale"] == 1.5


def test_clips_that_do_not_move_show_no_motion(data: MovingShapesDataModule) -> None:
    module = FakeTextToImage(still_clip, [0, 1])
    metrics = values(evaluate_moving_shapes(module, data, SAMPLING))  # type: ignore[arg-type]
    assert (metrics["oracle_colour"], metrics["oracle_shape"]) == (1, 1)
    assert (metrics["oracle_axis"], metrics["oracle_all"], metrics["motion_ratio"]) == (0, 0, 0)


class _Recorder(FakeTextToImage):
    logged: dict[str, float]

    def log_dict(self, values: dict[str, float], **options: Any) -> None:
        self.logged = values

    def generate(self, captions: Any, num_candidates: int = 1, **options: Any) -> Tensor:
        return super().generate(captions, num_candidates, **options)


def test_the_curve_tells_what_clips_of_some_captions_show(data: MovingShapesDataModule) -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    module = _Recorder(right_clip, [0])
    trainer.datamodule = data  # type: ignore[attr-defined]
    MotionCurve(num_captions=5).on_validation_epoch_end(trainer, module)  # type: ignore[arg-type]
    assert module.logged == dict.fromkeys(
        (f"val/oracle_{name}" for name in ("colour", "shape", "axis", "direction", "speed")), 1.0
    )
    assert len(module.calls[0]["captions"]) == 5
    assert set(module.calls[0]["captions"]) <= set(data.captions("val"))


def test_the_curve_needs_captions_that_the_oracle_knows() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    trainer.datamodule = None  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="datamodule \\(NoneType\\) must be MovingShapesDataModule"):
        MotionCurve().on_validation_epoch_end(trainer, torch.nn.Module())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_steps \\(0\\) must be at least 1"):
        MotionCurve(num_steps=0)
