"""What all captioned sets share: batches, order, tokens, resuming."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_dalle.data.captioned_dataset import CaptionedDataset, CaptionedSource
from lightning_dalle.data.clip_batches import ClipBatches
from lightning_dalle.data.keyed_random import check_seed
from lightning_dalle.data.resumable_loader import KeyedSampler, ResumableLoader
from lightning_dalle.data.tokenizer import CaptionTokenizer


class CaptionedDataModule(LightningDataModule, ABC):
    """Batches are mappings with a `caption` (list of B strings), and `text_tokens` (int64 [B, T]) with a tokenizer.

    What the captions describe is up to the subclass. Every choice is a function of (seed, epoch, index): a training run
    that continues from a checkpoint gets the very batches it would have got. Each data-parallel rank gets its share.

    Args:
        batch_size: Samples per rank; the last, smaller batch of a training epoch is left out.
        tokenizer: A tokenizer.json, as `lightning-dalle tokenizer` writes it; without one there are no `text_tokens`.
        text_tokens: Positions for a caption; longer captions are cut.
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
        """The split that is judged, in its order."""
        return self._plain_loader(self.test_split)

    def predict_dataloader(self) -> DataLoader:
        """The split that is judged, in its order."""
        return self._plain_loader(self.test_split)

    def _samples(self, split: str, training: bool = False) -> tuple[CaptionedDataset | ClipBatches, int | None]:
        """What loaders load of a split, and how many make a batch; None where each is a batch already."""
        return self.dataset(split, training=training), self.batch_size

    def _plain_loader(self, split: str) -> DataLoader:
        dataset, batch_size = self._samples(split)
        return DataLoader(dataset, batch_size=batch_size, num_workers=self.num_workers)
