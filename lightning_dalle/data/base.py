"""Data modules of captioned images and clips."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_dalle.data.augmentation import augmentation_named
from lightning_dalle.data.datasets import (
    CaptionedClipDataset,
    CaptionedDataset,
    CaptionedImageDataset,
    CaptionedSource,
    ClipSource,
    ImageSource,
)
from lightning_dalle.data.files.bucketing import TokenBuckets
from lightning_dalle.data.loader import KeyedSampler, ResumableLoader
from lightning_dalle.data.splits import check_val_share
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.ops.random import check_seed


class ClipBatches(Dataset):
    """The batches of a set in place of its clips, each collated by its `TokenBuckets`.

    Every epoch has as many. So all that shuffles, divides and resumes samples does the same with whole batches, the
    Trainer's samplers included: ranks get equally many, whatever the sizes in them. Indexed by (epoch, number of the
    batch), or by the number alone outside of training.
    """

    def __init__(self, dataset: CaptionedClipDataset, buckets: TokenBuckets) -> None:
        self.dataset = dataset
        self.buckets = buckets

    @property
    def max_tokens(self) -> int:
        """Of a batch."""
        return self.buckets.max_tokens

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, number = key if isinstance(key, tuple) else (0, key)
        # Workers keep their own copy of the buckets, and so their own epoch.
        self.buckets.set_epoch(epoch)
        return self.buckets.collate([self.dataset[epoch, index] for index in self.buckets[number]])


class CaptionedDataModule(LightningDataModule, ABC):
    """Batches are mappings with a `caption` (list of B strings), and `text_tokens` (int64 [B, T]) with a tokenizer.

    What the captions describe is up to the subclass. Every choice is a function of (seed, epoch, index): a training run
    that continues from a checkpoint gets the very batches it would have got. Each data-parallel rank gets its share.

    Args:
        batch_size: Samples per rank; the last, smaller batch of a training epoch is left out.
        tokenizer: A tokenizer.json, as `lightning-dalle tokenizer` writes it; without one there are no `text_tokens`.
        text_tokens: Positions for a caption; longer captions are truncated.
        bpe_dropout: Share of merges skipped in training; the paper's is .1. Never in validation.
        num_workers: Processes that prepare training and validation batches; 0 prepares them in the main process.
        seed: Of order, crops and dropout.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: the tokenizer file is missing.
    """

    test_split = "val"
    """The split that `Trainer.test` and `Trainer.predict` see."""

    def __init__(
        self,
        *,
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("text_tokens", text_tokens, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        if not 0 <= bpe_dropout < 1:
            raise ValueError(f"bpe_dropout ({bpe_dropout}) must be at least 0 and below 1, such as the paper's 0.1")
        self.batch_size = batch_size
        self.text_tokens = text_tokens
        self.bpe_dropout = bpe_dropout
        self.num_workers = num_workers
        self.seed = check_seed(seed)
        self.tokenizer = None if tokenizer is None else CaptionTokenizer.from_file(tokenizer)

    @abstractmethod
    def source(self, split: str) -> CaptionedSource:
        """What a split, `train` or `val` at least, is made of; made once, then the same object."""

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits that a stage needs."""
        for split in ("train", "val") if stage in (None, "fit") else ("val", self.test_split):
            self.source(split)

    def captions(self, split: str) -> list[str]:
        """All captions of a split, with repetitions, for instance to train a tokenizer on."""
        source = self.source(split)
        return [source.caption(index) for index in range(len(source))]

    @abstractmethod
    def dataset(self, split: str, *, training: bool = False) -> CaptionedDataset:
        """The samples of a split; augmentation and dropout in training only."""

    def _caption_settings(self, training: bool) -> dict[str, Any]:
        """What every dataset is to know about captions."""
        return {
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "text_tokens": self.text_tokens,
            "dropout": self.bpe_dropout if training else 0.0,
        }

    def train_dataloader(self) -> DataLoader:
        """Shuffled and augmented batches of this rank.

        Raises:
            ValueError: the training split does not fill one batch.
        """
        dataset, batch_size = self._samples("train", training=True)
        # Strategies name the ranks that see different samples, which are not always all of them.
        shares = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"num_replicas": 1, "rank": 0}
        sampler = KeyedSampler(dataset, shuffle=True, seed=self.seed, drop_last=True, **shares)
        if batch_size is None and len(sampler) < 1:
            raise ValueError(
                f"the training split makes {len(dataset)} batches for {sampler.num_replicas} ranks; lower max_tokens "
                "or take fewer ranks"
            )
        if batch_size is not None and len(sampler) < batch_size:
            raise ValueError(
                f"batch_size ({batch_size}) must not exceed the {len(sampler)} training samples of a rank, "
                f"since incomplete batches are left out; the training split has {len(dataset)}"
            )
        return ResumableLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=batch_size is not None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader:
        """The validation split in its order; the last batch may be smaller."""
        return self._plain_loader("val")

    def test_dataloader(self) -> DataLoader:
        """The split that is evaluated, in its order."""
        return self._plain_loader(self.test_split)

    def predict_dataloader(self) -> DataLoader:
        """The split that is evaluated, in its order."""
        return self._plain_loader(self.test_split)

    def _samples(self, split: str, training: bool = False) -> tuple[CaptionedDataset | ClipBatches, int | None]:
        """What loaders load of a split, and how many make a batch; None where each is a batch already."""
        return self.dataset(split, training=training), self.batch_size

    def _plain_loader(self, split: str) -> DataLoader:
        dataset, batch_size = self._samples(split)
        return DataLoader(dataset, batch_size=batch_size, num_workers=self.num_workers)


AugmentationName = Literal["none", "discrete_vae", "text_to_image"]


class CaptionedImageDataModule(CaptionedDataModule):
    """Batches `{"image": uint8 [B, 3, S, S], "caption": list of B strings, "text_tokens": int64 [B, T]}`.

    Args:
        image_size: Side of the images in pixels.
        augmentation: Of training images; `discrete_vae` and `text_to_image` are the paper's listings 1 and 2.
        settings: See `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    def __init__(self, *, image_size: int, augmentation: AugmentationName = "none", **settings: Any) -> None:
        super().__init__(**settings)
        if image_size < 1:
            raise ValueError(f"image_size ({image_size}) must be at least 1")
        self.image_size = image_size
        self.augmentation = augmentation_named(augmentation)

    @abstractmethod
    def source(self, split: str) -> ImageSource:
        """Images and captions of a split, `train` or `val` at least; made once, then the same object."""

    def dataset(self, split: str, *, training: bool = False) -> CaptionedImageDataset:
        """Images of a split, augmented in training only."""
        return CaptionedImageDataset(
            self.source(split),
            self.image_size,
            augmentation=self.augmentation if training else None,
            **self._caption_settings(training),
        )


logger = logging.getLogger(__name__)


class CaptionedVideoDataModule(CaptionedDataModule):
    """Batches `{"video": uint8 [B, 3, T, H, W], "caption": list of B strings, "text_tokens": int64 [B, L]}`.

    Args:
        frames: T, of every clip.
        height: H, in pixels.
        width: W, in pixels.
        settings: See `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    def __init__(self, *, frames: int = 8, height: int = 32, width: int = 32, **settings: Any) -> None:
        super().__init__(**settings)
        for name, value in (("frames", frames), ("height", height), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        self.frames = frames
        self.height = height
        self.width = width

    @abstractmethod
    def source(self, split: str) -> ClipSource:
        """Clips and captions of a split, `train` or `val` at least; made once, then the same object."""

    def dataset(self, split: str, *, training: bool = False) -> CaptionedClipDataset:
        """Clips of a split, cropped at random from longer ones in training only."""
        return CaptionedClipDataset(self.source(split), random_cuts=training, **self._caption_settings(training))

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits that a stage needs, and log before training what they hold."""
        super().setup(stage)
        if stage in (None, "fit"):
            logger.info("%s: %s", type(self).__name__, self.report())

    def skipped(self) -> Counter[str]:
        """How many clips were left out so far, by the reason."""
        return Counter()

    def report(self) -> str:
        """How many clips each split takes, and how many were left out and why."""
        splits = ("train", "val") if self.test_split == "val" else ("train", "val", self.test_split)
        taken = ", ".join(f"{len(self.source(split))} in {split}" for split in splits)
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped().items()))
        return f"clips: {taken}; left out: {skipped or 'none'}"


class NameSplitDataModule(CaptionedDataModule):
    """Loads all its splits at the first look at one of them; to be named before the class that says what of.

    Args:
        val_share: Share of the samples kept for validation, chosen by a hash of the name.
        settings: See `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range, or there is no such split; the message names it.
    """

    def __init__(self, *, val_share: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.val_share = check_val_share(val_share)
        self._sources: Mapping[str, Any] = {}

    def source(self, split: str) -> Any:
        """What a split is made of."""
        if not self._sources:
            self._sources = self._load()
        if split not in self._sources:
            raise ValueError(f"split ({split!r}) must be one of {', '.join(self._sources)}")
        return self._sources[split]

    @abstractmethod
    def _load(self) -> Mapping[str, Any]:
        """All splits by name, divided by `validation_mask` of the samples' names."""
