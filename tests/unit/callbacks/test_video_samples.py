import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor

from lightning_dalle.callbacks import VideoSamples, video_samples
from lightning_dalle.data.files.decoding import ClipShape, decode_clip
from lightning_dalle.evaluation.clip_features import frame_difference
from lightning_dalle.evaluation.logging import clip_grid
from tests.foreign_module import (
    LIGHTNING_WARNINGS,
    QUIET,
    Filmer,
    Painter,
    filmed_clips,
    filmed_loader,
    fit,
    painted_loader,
)
from tests.offline_wandb import offline_wandb

pytestmark = LIGHTNING_WARNINGS
PROMPTS = ["a dark field", "a light field"]


def test_clips_of_the_captions_are_written_as_one(tmp_path: Path) -> None:
    callback = VideoSamples(PROMPTS, num_candidates=2, suffix=".webp")
    trainer = fit(Filmer(), [callback], logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=1)
    assert callback.clips is not None
    assert callback.clips.shape == (2, 2, 3, 3, 8, 8)
    path = tmp_path / "run" / "version_0" / "videos" / f"val-samples-{trainer.global_step}.webp"
    grid = clip_grid(callback.clips.flatten(0, 1), columns=2)
    shape = ClipShape(3, grid.shape[2], grid.shape[3], 8.0)
    np.testing.assert_array_equal(decode_clip(path.read_bytes(), shape), grid)
    assert path.with_suffix(".txt").read_text() == "a dark field\na light field\n"


def test_wandb_gets_an_encoded_file(tmp_path: Path) -> None:
    with offline_wandb():
        logger = WandbLogger(offline=True, save_dir=tmp_path)
        fit(Filmer(), [VideoSamples(PROMPTS)], logger=logger, log_every_n_steps=1)
        logger.experiment.finish()
    (path,) = tmp_path.rglob("media/videos/val/samples*.mp4")
    assert path.read_bytes()[4:8] == b"ftyp"


def test_motion_of_samples_and_data_is_logged() -> None:
    callback = VideoSamples(PROMPTS)
    trainer = Trainer(**QUIET, callbacks=[callback])
    trainer.validate(Filmer(), filmed_loader(), verbose=False)
    assert callback.clips is not None
    samples, data = (frame_difference(clips).mean() for clips in (callback.clips.flatten(0, 1), filmed_clips()))
    metrics = trainer.callback_metrics
    torch.testing.assert_close(metrics["val/sample_motion"], samples)
    torch.testing.assert_close(metrics["val/data_motion"], data)
    torch.testing.assert_close(metrics["val/motion_ratio"], samples / data)
    trainer.test(Filmer(), filmed_loader(2), verbose=False)
    torch.testing.assert_close(trainer.callback_metrics["test/data_motion"], frame_difference(filmed_clips(2)).mean())


def test_without_clips_in_the_batches_there_is_no_motion_of_data() -> None:
    trainer = fit(Filmer(), [VideoSamples(PROMPTS)])
    assert {name for name in trainer.callback_metrics if "motion" in name} == {"val/sample_motion"}


def test_nothing_is_done_off_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Tensor] = []

    def measure(clips: Tensor) -> Tensor:
        measured.append(clips)
        return frame_difference(clips)

    monkeypatch.setattr(video_samples, "frame_difference", measure)
    filmer, callback = Filmer(), VideoSamples(PROMPTS, every_n_validations=2)
    filmer_trainer = Trainer(**QUIET, callbacks=[callback], max_epochs=1)
    filmer_trainer.fit(filmer, painted_loader(), filmed_loader())
    assert (filmer.calls, measured, callback.clips) == ([], [], None)


def test_prediction_draws_without_figures(tmp_path: Path) -> None:
    callback = VideoSamples(PROMPTS)
    options = {**QUIET, "logger": CSVLogger(tmp_path, name="run", version=0)}
    Trainer(**options, callbacks=[callback]).predict(Filmer(), filmed_loader())
    assert callback.clips is not None
    assert (tmp_path / "run" / "version_0" / "videos" / "predict-samples-0.mp4").is_file()


def test_many_clips_are_drawn_in_several_calls_with_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_samples, "MAX_CLIPS_AT_ONCE", 2)
    filmer, callback = Filmer(learning_rate=0.0), VideoSamples(["grey"] * 3, num_candidates=2)
    fit(filmer, [callback])
    assert [len(call["captions"]) for call in filmer.calls] == [1] * 9
    assert callback.clips is not None
    assert len({clip.numpy().tobytes() for clip in callback.clips.flatten(0, 1)}) == 6


def test_model_of_images_is_refused() -> None:
    with pytest.raises(TypeError, match=r"generate of Painter returned images \(2, 1, 3, 8, 8\); VideoSamples needs"):
        fit(Painter(), [VideoSamples(PROMPTS)])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"captions": "dark"}, TypeError, r"captions \('dark'\) must be a sequence of strings"),
        ({"captions": []}, ValueError, r"captions \(none\) must hold at least one caption"),
        ({"num_candidates": 0}, ValueError, r"num_candidates \(0\) must be at least 1"),
        ({"suffix": ".avi"}, ValueError, r"suffix \('.avi'\) must be one of .mp4, .gif, .webp"),
        ({"frame_rate": 0.0}, ValueError, r"frame_rate \(0.0\) must be above 0"),
        ({"every_n_validations": 0}, ValueError, r"every_n_validations \(0\) must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VideoSamples(**{"captions": PROMPTS, **arguments})


def test_without_its_package_the_extra_is_named_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert VideoSamples(PROMPTS, suffix=".gif").suffix == ".gif"
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dalle\[video\]"):
        VideoSamples(PROMPTS)
