import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dalle.data.files.samples import SampleError
from lightning_dalle.data.files.videos import CaptionedVideosDataModule
from tests.unit.data.clip_files import animation, frames, video, write_clip, write_clip_shard, write_clips


def videos(path: Path, **settings: Any) -> CaptionedVideosDataModule:
    defaults = {"frames": 8, "height": 12, "width": 16, "batch_size": 2, "val_share": 0.2}
    return CaptionedVideosDataModule(path=path, **{**defaults, **settings})


def all_captions(data: CaptionedVideosDataModule) -> list[str]:
    return sorted(data.captions("train") + data.captions("val"))


def numbered(count: int) -> list[str]:
    return sorted(f"clip number {number}" for number in range(count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"), 9)


def test_a_folder_of_all_formats_is_read(folder: Path) -> None:
    data = videos(folder)
    assert all_captions(data) == numbered(9)
    batch = next(iter(data.train_dataloader()))
    assert (batch["video"].shape, batch["video"].dtype) == ((2, 3, 8, 12, 16), torch.uint8)
    assert len(batch["caption"]) == 2
    taken = [len(data.captions(split)) for split in ("train", "val")]
    assert data.report() == f"clips: {taken[0]} in train, {taken[1]} in val; left out: none"


def test_a_clip_goes_with_its_caption(folder: Path, tmp_path: Path) -> None:
    for path in (folder, write_clip_shard(tmp_path / "00000.tar", 6)):
        dataset = videos(path).dataset("train")
        for index in range(len(dataset)):
            sample = dataset[index]
            number = int(sample["caption"].split()[-1])
            expected = frames(seed=number).transpose(3, 0, 1, 2)
            np.testing.assert_allclose(sample["video"].numpy().astype(int), expected, atol=12)


def test_training_cuts_at_random_and_validation_in_the_middle(tmp_path: Path) -> None:
    for number in range(4):
        write_clip(tmp_path, f"{number}.webp", f"clip number {number}", animation(frames(20, seed=number)))
    data = videos(tmp_path)
    training, plain = data.dataset("train", training=True), data.dataset("train")
    crops = [training[(epoch, 0)]["video"].numpy().tobytes() for epoch in range(6)]
    assert len(set(crops)) > 2
    assert crops[3] == videos(tmp_path).dataset("train", training=True)[(3, 0)]["video"].numpy().tobytes()
    assert len({plain[(epoch, 0)]["video"].numpy().tobytes() for epoch in range(6)}) == 1


@pytest.mark.parametrize(
    ("name", "caption", "content"),
    [
        ("broken.webp", "a caption", b"RIFF1234WEBPjunk"),
        ("broken.mp4", "a caption", b"no clip at all"),
        ("empty.gif", "a caption", b""),
        ("truncated.mp4", "a caption", video(frames())[:400]),
        ("blank.webp", " \n\t", None),
        ("bare.webp", None, None),
    ],
)
def test_what_cannot_be_used_is_skipped_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, caption: str | None, content: bytes | None
) -> None:
    for number in range(9):
        write_clip(tmp_path, f"{number:03}.webp", f"clip number {number}", animation(frames(seed=number)))
    write_clip(tmp_path, name, caption, content)
    data = videos(tmp_path, max_broken_share=0.1)
    with caplog.at_level(logging.INFO):
        assert all_captions(data) == numbered(9)
    stem = name.partition(".")[0]
    assert [record.message for record in caplog.records if record.message.startswith(f"skipped {stem}: ")]
    assert "9 clips, 1 skipped" in caplog.text
    assert data.report().endswith("left out: 1 unusable")
    with pytest.raises(SampleError, match=rf"1 of 10 samples .* max_broken_share \(0.05\).* The first: {stem}: "):
        videos(tmp_path).setup()


def test_short_clips_and_stills_are_counted(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_clip(tmp_path, f"{number}.webp", "a caption")
    write_clip(tmp_path, "short.webp", "a short clip", animation(frames(7)))
    write_clip(tmp_path, "short.mp4", "a short clip", video(frames(7)))
    write_clip(tmp_path, "still.webp", "a still", animation(frames(1)))
    data = videos(tmp_path)
    assert data.skipped() == {}
    assert len(all_captions(data)) == 3
    assert data.skipped() == {"too short": 2}
    assert data.report().endswith("left out: 2 too short")


def test_a_clip_whose_pictures_are_broken_is_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        write_clip(tmp_path, f"{number}.webp", f"clip number {number}", animation(frames(seed=number)))
    data = videos(tmp_path, max_broken_share=0.2, val_share=0.3)
    data.setup()
    name = data.source("train").files[0].name
    (tmp_path / f"{name}.webp").write_bytes(b"overwritten")
    captions = [caption for batch in data._plain_loader("train") for caption in batch["caption"]]
    assert len(captions) == len(data.source("train"))
    assert f"clip number {name}" not in captions
    assert f"skipped {name}: the clip cannot be decoded" in caplog.text
    assert data.skipped() == {"unusable": 1}


def test_a_folder_without_clips_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(SampleError, match=r"holds 0 usable captioned clips, at least 2 are needed \(0 unusable, "):
        videos(tmp_path).setup()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frame_rate": 0.0}, r"frame_rate \(0.0\) must be above 0"),
        ({"max_broken_share": 1.5}, r"max_broken_share \(1.5\) must be between 0 and 1"),
        ({"val_share": 0.0}, r"val_share \(0.0\) must be above 0"),
        ({"frames": 0}, r"frames \(0\) must be at least 1"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        videos(tmp_path, **settings)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path \('.*/nowhere'\) does not exist; give a folder of clips"):
        videos(tmp_path / "nowhere")
