"""The data module of captioned images or clips: a source for each split, a transform, and loaders that resume."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_dalle.data.datasets import CaptionedDataset, CaptionedSource, Transform
from lightning_dalle.data.files.bucketing import TokenBuckets
from lightning_dalle.data.loader import KeyedSampler, ResumableLoader
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.ops.random import check_seed

logger = logging.getLogger(__name__)


class ClipBatches(Dataset):
    """The batches of a set in place of its clips, each collated by its `TokenBuckets`.

    Every epoch has as many. So all that shuffles, divides and resumes samples does the same with whole batches, the
    Trainer's samplers included: ranks get equally many, whatever the sizes in them. Indexed by (epoch, number of the
    batch), or by the number alone outside of training.
    """

    def __init__(self, dataset: CaptionedDataset, buckets: TokenBuckets) -> None:
        self.dataset = dataset
        self.buckets = buckets

    @property
    def max_tokens(self) -> int:
        """Tokens of a batch at most."""
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

    A subclass says of what its splits are made, in `load_sources`, and gives a transform, which says what else is in a
    batch. Every choice is a function of (seed, epoch, index): a training run that continues from a checkpoint gets the
    very batches it would have got. Each data-parallel rank gets its share.

    Args:
        transform: What becomes of a sample: `ImageTransform`, `ClipTransform`, or one of your own.
        batch_size: Samples per rank; the last, smaller batch of a training epoch is left out.
        tokenizer: A tokenizer.json, as `lightning-dalle tokenizer` writes it; without one there are no `text_tokens`.
        text_tokens: Positions for a caption; longer captions are truncated.
        bpe_dropout: Share of merges skipped in training; the paper's is .1. Never in validation.
        num_workers: Processes that prepare training and validation batches; 0 prepares them in the main process.
        seed: Seeds order, crops and dropout.

    Raises:
        ValueError: If a setting is out of its range; the message names it.
        FileNotFoundError: If the tokenizer file is missing.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    """The splits there are."""
    test_split: ClassVar[str] = "val"
    """The split that `Trainer.test` and `Trainer.predict` see."""
    sample_name: ClassVar[str] = "samples"

    def __init__(
        self,
        transform: Transform[Any],
        *,
        batch_size: int,
        tokenizer: str | Path | None,
        text_tokens: int,
        bpe_dropout: float,
        num_workers: int,
        seed: int,
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
        self.transform = transform
        self.batch_size = batch_size
        self.text_tokens = text_tokens
        self.bpe_dropout = bpe_dropout
        self.num_workers = num_workers
        self.seed = check_seed(seed)
        self.tokenizer = None if tokenizer is None else CaptionTokenizer.from_file(tokenizer)
        self._sources: dict[str, Any] = {}

    @abstractmethod
    def load_sources(self, split: str) -> Mapping[str, CaptionedSource]:
        """Return the source of a split by its name, and those of others if they are made together."""

    def source(self, split: str) -> Any:
        """Return what a split is made of; made once, then the same object.

        Raises:
            ValueError: If there is no such split.
        """
        if split not in self.splits:
            raise ValueError(f"split ({split!r}) must be one of {', '.join(self.splits)}")
        if split not in self._sources:
            self._sources.update(self.load_sources(split))
        return self._sources[split]

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits that a stage needs, and log before training what they hold."""
        for split in ("train", "val") if stage in (None, "fit") else ("val", self.test_split):
            self.source(split)
        if stage in (None, "fit"):
            logger.info("%s: %s", type(self).__name__, self.report())

    def captions(self, split: str) -> list[str]:
        """Return all captions of a split, with repetitions, for instance to train a tokenizer on."""
        source = self.source(split)
        return [source.caption(index) for index in range(len(source))]

    def skipped(self) -> Counter[str]:
        """Return how many samples were left out so far, by the reason."""
        return Counter()

    def report(self) -> str:
        """Return how many samples each split takes, and how many were left out and why."""
        splits = dict.fromkeys(("train", "val", self.test_split))
        taken = ", ".join(f"{len(self.source(split))} in {split}" for split in splits)
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped().items()))
        return f"{self.sample_name}: {taken}; left out: {skipped or 'none'}"

    def dataset(self, split: str, *, training: bool = False) -> CaptionedDataset[Any]:
        """Return the samples of a split; random crops, augmentation and dropout in training only."""
        return CaptionedDataset(
            self.source(split),
            self.transform,
            training=training,
            seed=self.seed,
            tokenizer=self.tokenizer,
            text_tokens=self.text_tokens,
            bpe_dropout=self.bpe_dropout if training else 0.0,
        )

    def train_dataloader(self) -> DataLoader:
        """Return shuffled and augmented batches of this rank.

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
        """Return the validation split in its order; the last batch may be smaller."""
        return self._plain_loader("val")

    def test_dataloader(self) -> DataLoader:
        """Return the split that is evaluated, in its order."""
        return self._plain_loader(self.test_split)

    def predict_dataloader(self) -> DataLoader:
        """Return the split that is evaluated, in its order."""
        return self._plain_loader(self.test_split)

    def _samples(self, split: str, training: bool = False) -> tuple[CaptionedDataset[Any] | ClipBatches, int | None]:
        """Return what loaders load of a split, and how many make a batch; None where each is a batch already."""
        return self.dataset(split, training=training), self.batch_size

    def _plain_loader(self, split: str) -> DataLoader:
        dataset, batch_size = self._samples(split)
        return DataLoader(dataset, batch_size=batch_size, num_workers=self.num_workers)


def check_clip_size(frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return the size of clips if each side is at least 1.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in (("frames", frames), ("height", height), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    return frames, height, width
