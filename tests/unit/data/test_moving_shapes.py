import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.data.moving_shapes.motions import held_out_motions, parse_motion
from lightning_dalle.data.moving_shapes.oracle import matches_each
from lightning_dalle.data.tokenizer import CaptionTokenizer


def shapes(**settings: Any) -> MovingShapesDataModule:
    return MovingShapesDataModule(**{"num_train": 40, "num_val": 10, "batch_size": 8, **settings})


@pytest.mark.parametrize(("frames", "height", "width"), [(8, 32, 32), (12, 32, 48)])
def test_batches_are_clips_and_captions_that_describe_them(frames: int, height: int, width: int) -> None:
    data = shapes(frames=frames, height=height, width=width)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        batch = next(iter(loader))
        assert set(batch) == {"video", "caption"}
        assert (batch["video"].shape, batch["video"].dtype) == ((8, 3, frames, height, width), torch.uint8)
        assert matches_each(batch["video"], batch["caption"]).all()


def test_a_tokenizer_adds_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    CaptionTokenizer.train(shapes().captions("train"), 300).save(path)
    batch = next(iter(shapes(tokenizer=path, text_tokens=24).train_dataloader()))
    assert (batch["text_tokens"].shape, batch["text_tokens"].dtype) == ((8, 24), torch.int64)


def test_held_out_motions_are_judged_and_never_trained_on() -> None:
    data = shapes(num_train=500, num_val=100)
    assert data.captions("held_out") == data.held_out_captions() == [motion.caption for motion in held_out_motions()]
    for split in ("train", "val"):
        assert not {parse_motion(caption) for caption in data.captions(split)} & set(held_out_motions())
    evaluated = [caption for batch in data.test_dataloader() for caption in batch["caption"]]
    assert evaluated == data.held_out_captions()


def test_clips_are_a_function_of_seed_split_and_index() -> None:
    def content(data: MovingShapesDataModule, split: str) -> list[tuple[bytes, str]]:
        samples = [data.dataset(split, training=True)[(0, index)] for index in range(10)]
        return [(sample["video"].numpy().tobytes(), sample["caption"]) for sample in samples]

    assert content(shapes(), "train") == content(shapes(), "train")
    assert content(shapes(), "train") != content(shapes(seed=1), "train")
    assert content(shapes(num_val=40), "train") != content(shapes(num_val=40), "val")


def test_the_report_counts_what_is_taken_and_is_logged_before_training(caplog: pytest.LogCaptureFixture) -> None:
    report = "clips: 40 in train, 10 in val, 24 in held_out; left out: none"
    assert shapes().report() == report
    with caplog.at_level(logging.INFO):
        shapes().setup("test")
        assert caplog.messages == []
        shapes().setup("fit")
    assert caplog.messages == [f"MovingShapesDataModule: {report}"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames": 0}, r"frames \(0\) must be at least 1"),
        ({"height": 0}, r"height \(0\) must be at least 1"),
        ({"width": -1}, r"width \(-1\) must be at least 1"),
        ({"frames": 13}, r"frames \(13\) must be between 2"),
        ({"num_train": 0}, r"num_train \(0\) must be at least 1"),
        ({"num_val": 0}, r"num_val \(0\) must be at least 1"),
        ({"batch_size": 0}, r"batch_size \(0\) must be at least 1"),
    ],
)
def test_wrong_settings_are_named_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(**settings)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match=r"split \('all'\) must be one of train, val, held_out"):
        shapes().captions("all")


def test_the_command_line_sees_all_settings() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(CaptionedDataModule, "data")
    settings = {"num_train": 30, "batch_size": 3, "frames": 9, "width": 48, "seed": 4}
    class_path = "lightning_dalle.data.moving_shapes.data_module.MovingShapesDataModule"
    parsed = parser.parse_object({"data": {"class_path": class_path, "init_args": settings}})
    data = parser.instantiate(parsed).data
    assert (data.batch_size, data.frames, data.width, data.seed, len(data.captions("train"))) == (3, 9, 48, 4, 30)
