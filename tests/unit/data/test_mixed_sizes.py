"""Clips of several sizes from one folder: the size each is brought to, batches, ranks, resuming, broken ones."""

import logging
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dalle.data.files.bucketing import MixedSizes
from lightning_dalle.data.files.decoding import ClipExtent, ClipShape
from lightning_dalle.data.files.videos import CaptionedVideosDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer
from tests.unit.data.clip_files import animation, frames, video, write_clip, write_clip_shard
from tests.unit.data.test_captioned_data_module import FakeTrainer

Size = tuple[int, int, int]
# Frames, height and width of the files, and what is made of them by the settings.
FILES: list[Size] = [(8, 16, 16), (4, 16, 24), (6, 32, 48)]
PACKED: list[Size] = [(8, 16, 16), (4, 16, 24), (6, 16, 24)]
BUCKETS: list[Size] = [(8, 16, 16), (4, 16, 24), (8, 16, 24)]
SETTINGS: dict[str, Any] = {"frames": 8, "height": 16, "width": 24, "max_tokens": 64, "token_size": (2, 8, 8)}
COUNT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    for number in range(COUNT):
        count, height, width = FILES[number % 3]
        pixels = frames(count, (width, height), seed=number)
        suffix, content = [(".webp", animation), (".mp4", video)][number % 2]
        write_clip(path, f"{number:03}{suffix}", f"clip number {number}", content(pixels))
    return path


def videos(path: Path, **settings: Any) -> CaptionedVideosDataModule:
    return CaptionedVideosDataModule(path=path, **{"val_share": 0.2, **SETTINGS, **settings})


def train_loader(data: CaptionedVideosDataModule, epoch: int = 0, ranks: int = 1, rank: int = 0) -> Any:
    data.trainer = FakeTrainer(ranks, rank)  # type: ignore[assignment]
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return loader


def contents(batches: Any) -> list[Any]:
    return [([clip.numpy().tobytes() for clip in batch["video"]], batch["caption"]) for batch in batches]


def numbers(batch: dict[str, Any]) -> list[int]:
    return [int(caption.split()[-1]) for caption in batch["caption"]]


@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["packed", "padded"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_clip_comes_once_in_its_size(folder: Path, buckets: list[Size] | None, epoch: int) -> None:
    data = videos(folder, buckets=buckets)
    for split, loader in (("train", train_loader(data, epoch)), ("val", data.val_dataloader())):
        batches = list(loader)
        assert sorted(caption for batch in batches for caption in batch["caption"]) == sorted(data.captions(split))
        assert len(batches) == len(loader)
        assert max(len(batch["caption"]) for batch in batches) > 1
        for batch in batches:
            assert isinstance(batch["video"], list if buckets is None else torch.Tensor)
            expected = PACKED if buckets is None else [BUCKETS[0], BUCKETS[1], BUCKETS[2]]
            assert [tuple(clip.shape) for clip in batch["video"]] == [
                (3, *expected[number % 3]) for number in numbers(batch)
            ]
            assert {clip.dtype for clip in batch["video"]} == {torch.uint8}
            assert sum(math.prod(clip.shape) for clip in batch["video"]) <= 64 * 3 * 2 * 8 * 8


def test_epochs_mix_sizes_and_companions_anew(folder: Path) -> None:
    data = videos(folder)
    epochs = [[set(numbers(batch)) for batch in train_loader(data, epoch)] for epoch in range(2)]
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1]))
    assert len(epochs[0]) == len(epochs[1])
    assert any(len({number % 3 for number in batch}) > 1 for batch in epochs[0])
    assert [numbers(batch) for batch in data.val_dataloader()] == [numbers(batch) for batch in data.val_dataloader()]


@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["packed", "padded"])
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("done", [1, 3])
def test_a_run_continues_in_the_middle_of_an_epoch(
    folder: Path, buckets: list[Size] | None, epoch: int, done: int
) -> None:
    whole = contents(train_loader(videos(folder, buckets=buckets), epoch))
    interrupted = train_loader(videos(folder, buckets=buckets), epoch)
    list(islice(interrupted, done))
    continued = train_loader(videos(folder, buckets=buckets), epoch)
    continued.load_state_dict(interrupted.state_dict())
    assert contents(continued) == whole[done:]


def test_another_number_of_tokens_warns_on_resuming(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = train_loader(videos(folder)).state_dict()
    train_loader(videos(folder)).load_state_dict(state)
    assert caplog.text == ""
    train_loader(videos(folder, max_tokens=32)).load_state_dict(state)
    assert "with max_tokens 64 on 1 ranks, now max_tokens 32 on 1 ranks" in caplog.text


def test_ranks_share_all_batches_but_a_remainder(folder: Path) -> None:
    data = videos(folder)
    whole = [numbers(batch) for batch in train_loader(data, 1)]
    shares = [[numbers(batch) for batch in train_loader(videos(folder), 1, 2, rank)] for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == len(whole) // 2
    flat = [number for share in shares for batch in share for number in batch]
    assert len(set(flat)) == len(flat)
    assert sorted(map(sorted, shares[0] + shares[1])) == sorted(
        sorted(whole[place]) for place in range(len(whole) // 2 * 2)
    )
    with pytest.raises(ValueError, match=rf"makes {len(whole)} batches for 40 ranks; lower max_tokens"):
        train_loader(data, 1, 40, 0)


def test_workers_and_shards_give_the_same_batches(folder: Path, tmp_path: Path) -> None:
    assert contents(train_loader(videos(folder, num_workers=1), 1)) == contents(train_loader(videos(folder), 1))
    data = videos(write_clip_shard(tmp_path / "00000.tar", 8), token_size=(2, 4, 8))
    batches = list(train_loader(data))
    assert {tuple(clip.shape) for batch in batches for clip in batch["video"]} == {(3, 8, 12, 16)}
    assert sum(len(batch["caption"]) for batch in batches) == len(data.captions("train"))


def test_captions_come_as_tokens(folder: Path, tmp_path: Path) -> None:
    tokenizer = CaptionTokenizer.train(["clip number 0123456789"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    data = videos(folder, tokenizer=tmp_path / "tokenizer.json", text_tokens=20, bpe_dropout=0.0)
    for batch in train_loader(data):
        assert torch.equal(batch["text_tokens"], tokenizer.encode(batch["caption"], 20))


def test_what_becomes_of_each_size_is_logged_before_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = videos(folder, buckets=[(8, 16, 16), (4, 16, 24)])
    with caplog.at_level(logging.INFO):
        data.setup("fit")
    of_train, of_val = (Counter(int(caption.split()[-1]) % 3 for caption in data.captions(s)) for s in ("train", "val"))
    assert (
        f"CaptionedVideosDataModule: clips: {of_train.total()} in train, {of_val.total()} in val; left out: none"
        in caplog.text
    )
    for split, counts in (("train", of_train), ("val", of_val)):
        assert f"\n{split}, 8 x 16 x 16: {counts[0]} taken, 0 of them padded, 0 dropped" in caplog.text
        assert f"\n{split}, 4 x 16 x 24: {counts[1]} taken, 0 of them padded, 0 dropped" in caplog.text
        assert f"\n{split}, 6 x 16 x 24: 0 taken, 0 of them padded, {counts[2]} dropped" in caplog.text
    with pytest.raises(ValueError, match=r"no batch is left of .* clips; raise max_tokens \(3\)"):
        videos(folder, max_tokens=3).setup("fit")


@pytest.mark.parametrize("overwritten", [(0, 3, 6), (2,)])
def test_a_clip_whose_pictures_are_broken_is_replaced_in_its_size(
    folder: Path, tmp_path: Path, overwritten: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = videos(tmp_path, max_broken_share=0.2)
    data.setup("fit")
    for number in overwritten:
        next(tmp_path.glob(f"{number:03}.[wm]*")).write_bytes(b"overwritten")
    batches = [batch for split in ("train", "val") for batch in data._plain_loader(split)]
    sizes = Counter(tuple(clip.shape[1:]) for batch in batches for clip in batch["video"])
    assert sizes == Counter(dict.fromkeys(PACKED, COUNT // 3))
    assert not set(overwritten) & {number for batch in batches for number in numbers(batch)}
    for number in overwritten:
        assert f"skipped {number:03}: the clip cannot be decoded" in caplog.text
    assert data.skipped() == {"unusable": len(overwritten)}


def test_what_makes_no_token_is_counted(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_clip(tmp_path, f"{number}.webp", "a caption")
    write_clip(tmp_path, "still.gif", "a still", animation(frames(1), image_format="GIF"))
    write_clip(tmp_path, "small.webp", "a small clip", animation(frames(8, (16, 2))))
    data = videos(tmp_path)
    data.setup()
    assert data.skipped() == {"less than a token": 2}


def mixed(**settings: Any) -> MixedSizes:
    defaults: dict[str, Any] = {"token_size": (1, 1, 1), "buckets": None, "first_frame_alone": False, "max_tokens": 64}
    return MixedSizes(ClipShape(9, 32, 48, 8.0), **{**defaults, **settings})


@pytest.mark.parametrize(
    ("extent", "settings", "size"),
    [
        ((1.0, 20, 30), {}, (8, 20, 30)),
        ((5.0, 320, 480), {}, (9, 32, 48)),
        ((5.0, 480, 320), {}, (9, 32, 21)),
        ((5.0, 480, 320), {"token_size": (2, 8, 8)}, (8, 32, 16)),
        ((5.0, 480, 320), {"token_size": (4, 8, 8), "first_frame_alone": True}, (9, 32, 16)),
        ((0.99, 20, 30), {"token_size": (4, 4, 4), "first_frame_alone": True}, (5, 20, 28)),
        ((1.0, 20, 30), {"token_size": (4, 8, 8), "buckets": [(9, 32, 32)]}, (8, 20, 30)),
        ((0.13, 20, 30), {"token_size": (4, 8, 8), "first_frame_alone": True}, (1, 16, 24)),
        ((0.0, 20, 30), {}, None),
        ((1.0, 7, 30), {"token_size": (1, 8, 8)}, None),
    ],
)
def test_size_of_a_clip(extent: tuple[float, int, int], settings: dict[str, Any], size: Size | None) -> None:
    assert mixed(**settings).size_of(ClipExtent(*extent)) == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens \(0\) and token_size \(2, 8, 8\) must be at least 1"),
        ({"token_size": (2, 0, 8)}, r"token_size \(2, 0, 8\) must be at least 1"),
        ({"buckets": []}, r"buckets must be sizes \(frames, height, width\), or be left out"),
        ({"buckets": [(8, 32, 24)]}, r"bucket \(8, 32, 24\) must be .* at most frames \(8\), height \(16\) and"),
        ({"max_tokens": None}, r"token_size \(2, 8, 8\) and first_frame_alone \(False\) need max_tokens"),
        ({"max_tokens": None, "token_size": (1, 1, 1), "buckets": BUCKETS}, r"buckets \(.*\), .* need max_tokens"),
    ],
)
def test_wrong_settings_are_named(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        videos(folder, **settings)
