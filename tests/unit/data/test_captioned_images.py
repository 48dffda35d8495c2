import json
import logging
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dalle.data.files.images import CaptionedImagesDataModule
from lightning_dalle.data.files.samples import SampleError
from tests.unit.data.image_files import encoded, write_folder, write_pair, write_shard


def images(path: Path, **settings: Any) -> CaptionedImagesDataModule:
    return CaptionedImagesDataModule(path=path, **{"image_size": 8, "batch_size": 2, "val_share": 0.2, **settings})


def all_captions(data: CaptionedImagesDataModule) -> list[str]:
    return sorted(data.captions("train") + data.captions("val"))


def numbered(count: int) -> list[str]:
    return sorted(f"picture number {number}" for number in range(count))


def test_a_folder_is_read(tmp_path: Path) -> None:
    data = images(write_folder(tmp_path, 20))
    assert all_captions(data) == numbered(20)
    assert 0 < len(data.captions("val")) < 10
    batch = next(iter(data.train_dataloader()))
    assert (batch["image"].shape, len(batch["caption"])) == ((2, 3, 8, 8), 2)


def test_an_image_goes_with_its_caption(tmp_path: Path) -> None:
    data = images(write_folder(tmp_path / "folder", 6))
    shard = images(write_shard(tmp_path / "shards" / "00000.tar", 6))
    for source in (data.source("train"), shard.source("train")):
        assert len({source.sample(index)[0].tobytes() for index in range(len(source))}) == len(source)
    image, caption = data.source("train").sample(2)
    number = int(caption.split()[-1])
    expected = np.random.default_rng(number).integers(0, 256, (16, 20, 3)).astype(np.uint8)
    np.testing.assert_array_equal(image, expected.transpose(2, 0, 1))


def test_subfolders_json_and_capital_suffixes_are_read(tmp_path: Path) -> None:
    write_pair(tmp_path, "a/one", "picture number 0")
    (tmp_path / "a" / "one.json").write_text('{"caption": "the .txt comes first"}')
    write_pair(tmp_path, "b/c/one", None)
    (tmp_path / "b" / "c" / "one.json").write_text(json.dumps({"caption": "picture\nnumber  1 ", "width": 3}))
    write_pair(tmp_path, "two.point", None)
    (tmp_path / "two.png").rename(tmp_path / "two.PNG")
    (tmp_path / "two.TXT").write_text("\ufeffpicture number 2", encoding="utf-8")
    (tmp_path / ".hidden.png").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image beside it")
    assert all_captions(images(tmp_path)) == numbered(3)


def test_shards_are_read_in_a_folder_or_alone(tmp_path: Path) -> None:
    write_shard(tmp_path / "00000.tar", 5)
    write_shard(tmp_path / "00001.tar", 4, start=5)
    assert all_captions(images(tmp_path)) == numbered(9)
    assert all_captions(images(tmp_path / "00000.tar")) == numbered(5)


def test_the_split_depends_on_names_alone(tmp_path: Path) -> None:
    few = set(images(write_folder(tmp_path, 12)).captions("val"))
    many = set(images(write_folder(tmp_path, 30)).captions("val"))
    assert few <= many
    assert set(images(tmp_path, seed=1).captions("val")) == many


@pytest.mark.parametrize(
    ("name", "caption", "image"),
    [
        ("broken", "a caption", b"no image at all"),
        ("empty", "a caption", b""),
        ("headless", "a caption", encoded()[10:]),
        ("blank", " \n\t", None),
        ("bare", None, None),
    ],
)
def test_what_cannot_be_used_is_skipped_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, caption: str | None, image: bytes | None
) -> None:
    write_folder(tmp_path, 10)
    write_pair(tmp_path, name, caption, image)
    with caplog.at_level(logging.INFO):
        assert all_captions(images(tmp_path, max_broken_share=0.1)) == numbered(10)
    assert [record.message for record in caplog.records if record.message.startswith(f"skipped {name}: ")]
    assert "10 images, 1 skipped" in caplog.text
    with pytest.raises(SampleError, match=rf"1 of 11 samples .* max_broken_share \(0.05\).* The first: {name}: "):
        images(tmp_path).setup()


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"caption": 3}', '{"caption": null}', '{"text": "other key"}', "\x00"]
)
def test_a_json_without_a_caption_is_skipped(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, 4)
    write_pair(tmp_path, "odd", None)
    (tmp_path / "odd.json").write_text(content)
    assert all_captions(images(tmp_path, max_broken_share=0.5)) == numbered(4)
    assert "skipped odd: " in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_an_image_whose_pixels_are_broken_is_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, image_format: str, num_workers: int
) -> None:
    write_folder(tmp_path, 8)
    whole = encoded((64, 64), image_format=image_format)
    write_pair(tmp_path, "truncated", "a truncated picture", whole[: len(whole) // 2])
    data = images(tmp_path, max_broken_share=0.2, num_workers=num_workers)
    captions = [caption for split in ("train", "val") for batch in loader(data, split) for caption in batch["caption"]]
    assert len(captions) == 9
    assert set(captions) == set(numbered(8))
    if num_workers == 0:
        assert caplog.text.count("skipped truncated: the image cannot be decoded") == 1


def loader(data: CaptionedImagesDataModule, split: str) -> Any:
    """Everything of a split."""
    return data._plain_loader(split)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_too_many_broken_pixels_are_an_error_that_names_them(tmp_path: Path, num_workers: int) -> None:
    write_folder(tmp_path, 3)
    for number in range(3):
        write_pair(tmp_path, f"truncated{number}", "a truncated picture", encoded((64, 64))[:2000])
    data = images(tmp_path, max_broken_share=0.2, num_workers=num_workers)
    with pytest.raises(SampleError, match=r"2 of 6 samples cannot be used.* The first: truncated\d: .*; truncated\d: "):
        list(chain(loader(data, "train"), loader(data, "val")))


def test_if_no_image_can_be_decoded_that_is_said(tmp_path: Path) -> None:
    for number in range(3):
        write_pair(tmp_path, f"truncated{number}", "a truncated picture", encoded((64, 64))[:2000])
    with pytest.raises(SampleError, match=r"no image can be decoded. The first: truncated\d: "):
        images(tmp_path, max_broken_share=1.0).source("train").sample(0)


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.9])
def test_of_a_truncated_shard_the_first_samples_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: float
) -> None:
    write_shard(tmp_path / "00000.tar", 10)
    shard = write_shard(tmp_path / "00001.tar", 10, start=10)
    with tarfile.open(shard) as archive:
        end = archive.getmembers()[-1].offset
    shard.write_bytes(shard.read_bytes()[: int(end * kept)])
    captions = all_captions(images(tmp_path, max_broken_share=0.2))
    assert set(numbered(10)) < set(captions) < set(numbered(20))
    assert "00001.tar: the shard is damaged or truncated" in caplog.text


@pytest.mark.parametrize("content", [b"", b"garbage" * 200, "truncated", "overwritten"])
def test_a_shard_that_ends_without_an_end_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    write_shard(tmp_path / "00000.tar", 4)
    shard = write_shard(tmp_path / "00001.tar", 4, start=4)
    with tarfile.open(shard) as archive:
        boundary = archive.getmembers()[6].offset
    whole = shard.read_bytes()
    if content == "truncated":
        content = whole[:boundary]
    if content == "overwritten":
        content = whole[:boundary] + b"garbage!" * 64 + whole[boundary + 512 :]
    assert isinstance(content, bytes)
    shard.write_bytes(content)
    images(tmp_path, max_broken_share=0.5).setup()
    assert "skipped" in caplog.text
    assert "00001.tar: the shard is damaged or truncated" in caplog.text


def test_a_file_that_shrinks_after_the_scan_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = images(write_shard(tmp_path / "00000.tar", 12), max_broken_share=0.9)
    data.setup()
    (tmp_path / "00000.tar").write_bytes((tmp_path / "00000.tar").read_bytes()[:20_000])
    list(loader(data, "train"))
    assert "the image cannot be decoded" in caplog.text
    assert "ends after" in caplog.text


def test_filters_leave_out_and_count(tmp_path: Path) -> None:
    write_folder(tmp_path, 4)
    write_pair(tmp_path, "short", "dog")
    write_pair(tmp_path, "wide", "a very wide picture", encoded((41, 20)))
    write_pair(tmp_path, "tall", "a tall picture", encoded((20, 40)))
    unfiltered = images(tmp_path)
    assert len(all_captions(unfiltered)) == 7
    assert unfiltered.skipped().total() == 0
    filtered = images(tmp_path, filter_captions=True, max_aspect_ratio=2.0)
    assert all_captions(filtered) == sorted([*numbered(4), "a tall picture"])
    assert filtered.skipped() == {"short caption": 1, "aspect ratio": 1}


def test_a_folder_without_captioned_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(SampleError, match=r"holds 0 usable captioned images, at least 2 are needed \(0 unusable"):
        images(tmp_path).setup()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_broken_share": 1.5}, r"max_broken_share \(1.5\) must be between 0 and 1"),
        ({"max_aspect_ratio": 0.5}, r"max_aspect_ratio \(0.5\) must be at least 1"),
        ({"val_share": 0.0}, r"val_share \(0.0\) must be above 0"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        images(tmp_path, **settings)


def test_a_missing_path_and_an_unknown_split_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path \('.*none'\) does not exist"):
        images(tmp_path / "none")
    with pytest.raises(ValueError, match=r"split \('test'\) must be one of train, val"):
        images(write_folder(tmp_path, 4)).captions("test")
