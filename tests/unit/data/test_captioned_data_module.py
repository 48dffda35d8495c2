from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.datasets import CaptionedDataset
from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.shapes.oracle import matches_each
from lightning_dalle.data.shapes.scenes import is_trained, parse_caption
from lightning_dalle.data.tokenizer import CaptionTokenizer


def shapes(**settings: Any) -> CaptionedShapesDataModule:
    return CaptionedShapesDataModule(**{"num_train": 40, "num_val": 10, "batch_size": 8, **settings})


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    CaptionTokenizer.train(shapes().captions("train"), 300).save(path)
    return path


def test_batches_are_images_captions_and_tokens(tokenizer_file: Path) -> None:
    data = shapes(tokenizer=tokenizer_file, text_tokens=30)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        batch = next(iter(loader))
        assert set(batch) == {"image", "caption", "negative_caption", "text_tokens"}
        assert (batch["image"].shape, batch["image"].dtype) == ((8, 3, 40, 40), torch.uint8)
        assert (batch["text_tokens"].shape, batch["text_tokens"].dtype) == ((8, 30), torch.int64)
        assert len(batch["caption"]) == 8
        assert matches_each(batch["image"], batch["caption"]).all()
        assert not matches_each(batch["image"], batch["negative_caption"]).any()


def test_without_a_tokenizer_there_are_no_tokens() -> None:
    assert set(next(iter(shapes().train_dataloader()))) == {"image", "caption", "negative_caption"}


def test_only_training_drops_the_last_incomplete_batch() -> None:
    data = shapes(num_train=23)
    assert [len(batch["caption"]) for batch in data.train_dataloader()] == [8, 8]
    assert [len(batch["caption"]) for batch in data.val_dataloader()] == [8, 2]


def test_only_training_drops_merges(tokenizer_file: Path) -> None:
    tokenizer = CaptionTokenizer.from_file(tokenizer_file)
    data = shapes(tokenizer=tokenizer_file, text_tokens=64, bpe_dropout=0.5)

    def as_encoded(loader: Any) -> bool:
        batch = next(iter(loader))
        return bool(batch["text_tokens"].equal(tokenizer.encode(batch["caption"], 64)))

    assert as_encoded(data.val_dataloader())
    assert as_encoded(data.predict_dataloader())
    assert not as_encoded(data.train_dataloader())
    assert as_encoded(shapes(tokenizer=tokenizer_file, text_tokens=64, bpe_dropout=0.0).train_dataloader())
    assert CaptionTokenizer.from_file(tokenizer_file).to_json() == tokenizer.to_json()


def test_samples_depend_on_seed_epoch_and_index_alone(tokenizer_file: Path) -> None:
    settings = {"tokenizer": tokenizer_file, "bpe_dropout": 0.3, "augmentation": "discrete_vae", "text_tokens": 64}

    def samples(epoch: int, seed: int = 0) -> tuple[list[bytes], list[str], list[list[int]]]:
        dataset = shapes(**settings, seed=seed).train_dataloader().dataset
        found = [dataset[(epoch, index)] for index in range(10)]
        images, tokens = ([sample[name] for sample in found] for name in ("image", "text_tokens"))
        captions = [sample["caption"] for sample in found]
        return [image.numpy().tobytes() for image in images], captions, [row.tolist() for row in tokens]

    images, captions, tokens = samples(epoch=1)
    assert (images, captions, tokens) == samples(epoch=1)
    other_images, other_captions, other_tokens = samples(epoch=0)
    assert captions == other_captions
    assert images != other_images
    assert tokens != other_tokens
    assert captions != samples(epoch=1, seed=1)[1]


def test_shapes_of_training_and_held_out_compositions_are_apart() -> None:
    data = shapes(num_train=200, num_val=100)
    for split in ("train", "val"):
        assert all(is_trained(parse_caption(caption)) for caption in data.captions(split))
    held_out = data.captions("held_out")
    assert held_out == data.held_out_captions(1) + data.held_out_captions(2)
    assert not any(is_trained(parse_caption(caption)) for caption in held_out)
    pictures = {split: {data.source(split).sample(i)[0].tobytes() for i in range(100)} for split in ("train", "val")}
    assert not pictures["train"] <= pictures["val"]


@pytest.mark.parametrize(("one_object_share", "counts"), [(1, {1}), (0, {2}), (0.5, {1, 2})])
def test_pictures_show_as_many_objects_as_asked_for(one_object_share: float, counts: set[int]) -> None:
    data = shapes(one_object_share=one_object_share, num_train=200)
    for split in ("train", "held_out"):
        assert {len(parse_caption(caption).objects) for caption in data.captions(split)} == counts


def test_pictures_of_one_object_have_their_share_of_the_set() -> None:
    captions = shapes(num_train=2000, one_object_share=0.3).captions("train")
    # 2,000 draws of chance .3: deviation .010.
    assert sum(" a " not in caption for caption in captions) / 2000 == pytest.approx(0.3, abs=0.04)


class FakeTrainer:
    def __init__(self, num_replicas: int, rank: int) -> None:
        self.distributed_sampler_kwargs = {"num_replicas": num_replicas, "rank": rank}


def test_each_rank_of_a_trainer_has_its_share() -> None:
    shares = []
    for rank in range(2):
        data = shapes(num_train=41, batch_size=4)
        data.trainer = FakeTrainer(2, rank)  # type: ignore[assignment]
        shares.append({key for batch in data.train_dataloader().batch_sampler for key in batch})
    assert [len(share) for share in shares] == [20, 20]
    assert not shares[0] & shares[1]


def test_a_batch_larger_than_a_rank_s_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size \(41\) must not exceed the 40 training samples of a rank"):
        shapes(batch_size=41).train_dataloader()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ({"text_tokens": 0}, r"text_tokens \(0\) must be at least 1"),
        ({"num_workers": -1}, r"num_workers \(-1\) must be at least 0"),
        ({"seed": -1}, r"seed \(-1\) must be at least 0"),
        ({"bpe_dropout": 1.0}, r"bpe_dropout \(1.0\) must be at least 0 and below 1"),
        ({"augmentation": "flip"}, r"augmentation \('flip'\) must be one of"),
        ({"one_object_share": 1.5}, r"one_object_share \(1.5\) must be between 0 and 1"),
        ({"num_train": 0}, r"num_train \(0\) must be at least 1"),
        ({"image_size": 16}, r"image_size \(16\) must be at least 24"),
    ],
)
def test_wrong_settings_are_named_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(**settings)


def test_a_missing_tokenizer_is_named_at_construction(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train one on your captions with `lightning-dalle tokenizer`"):
        shapes(tokenizer=tmp_path / "tokenizer.json")


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match=r"split \('all'\) must be one of train, val, held_out"):
        shapes().captions("all")


def test_the_command_line_sees_all_settings() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(CaptionedDataModule, "data")
    settings = {"num_train": 30, "batch_size": 3, "bpe_dropout": 0.2, "augmentation": "text_to_image", "seed": 4}
    class_path = "lightning_dalle.data.shapes.data_module.CaptionedShapesDataModule"
    parsed = parser.parse_object({"data": {"class_path": class_path, "init_args": settings}})
    data = parser.instantiate(parsed).data
    assert (data.batch_size, data.bpe_dropout, data.seed, len(data.captions("train"))) == (3, 0.2, 4, 30)


def test_a_dataset_is_read_by_an_index_alone() -> None:
    dataset: CaptionedDataset = shapes().dataset("val")
    assert len(dataset) == 10
    assert dataset[3]["image"].equal(dataset[(0, 3)]["image"])
