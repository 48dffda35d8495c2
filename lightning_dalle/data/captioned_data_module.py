"""What all captioned image sets share: batches, order, tokens, resuming."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_dalle.data.augmentation import augmentation_named
from lightning_dalle.data.captioned_dataset import CaptionedDataset, CaptionedSource
from lightning_dalle.data.keyed_random import check_seed
from lightning_dalle.data.resumable_loader import KeyedSampler, ResumableLoader
from lightning_dalle.data.tokenizer import CaptionTokenizer

AugmentationName = Literal["none", "discrete_vae", "text_to_image"]


class CaptionedDataModule(LightningDataModule, ABC):
    """Batches `{"image": uint8 [B, 3, S, S], "caption": list of B strings, "text_tokens": int64 [B, T]}`.

    `text_tokens` only if there is a tokenizer. Every choice is a function of (seed, epoch, index): a training run
    that continues from a checkpoint gets the very batches it would have got. Each data-parallel rank gets its share.

    Args:
        image_size: Side of the images in pixels.
        batch_size: Samples per rank; the last, smaller batch of a training epoch is left out.
        tokenizer: A tokenizer.json, as `lightning-dalle tokenizer` writes it; without one there are no `text_tokens`.
        text_tokens: Positions for a caption; longer captions are cut.
        bpe_dropout: Share of merges skipped in training; the paper's is .1. Never in validation.
        augmentation: Of training images; `discrete_vae` and `text_to_image` are the paper's listings 1 and 2.
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
        image_size: int,
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        augmentation: AugmentationName = "none",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("image_size", image_size, 1),
            ("batch_size", batch_size, 1),
            ("text_tokens", text_tokens, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        if not 0 <= bpe_dropout < 1:
            raise ValueError(f"bpe_dropout ({bpe_dropout}) must be at least 0 and below 1, such as the paper's 0.1")
        self.image_size = image_size
        self.batch_size = batch_size
        self.text_tokens = text_tokens
        self.bpe_dropout = bpe_dropout
        self.augmentation = augmentation_named(augmentation)
        self.num_workers = num_workers
        self.seed = check_seed(seed)
        self.tokenizer = None if tokenizer is None else CaptionTokenizer.from_file(tokenizer)

    @abstractmethod
    def source(self, split: str) -> CaptionedSource:
        """Images and captions of a split, `train` or `val` at least; made once, then the same object."""

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits that a stage needs."""
        for split in ("train", "val") if stage in (None, "fit") else ("val", self.test_split):
            self.source(split)

    def captions(self, split: str) -> list[str]:
        """All captions of a split, with repetitions, for instance to train a tokenizer on."""
        source = self.source(split)
        return [source.caption(index) for index in range(len(source))]

    def dataset(self, split: str) -> CaptionedDataset:
        """A split without augmentation and dropout."""
        return CaptionedDataset(
            self.source(split),
            self.image_size,
            seed=self.seed,
            tokenizer=self.tokenizer,
            text_tokens=self.text_tokens,
        )

    def train_dataloader(self) -> DataLoader:
        """Shuffled and augmented batches of this rank.

        Raises:
            ValueError: the training split does not fill one batch.
        """
        dataset = self.dataset("train")
        dataset.augmentation, dataset.dropout = self.augmentation, self.bpe_dropout
        # Strategies name the ranks that see different samples, which are not always all of them.
        shares = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"num_replicas": 1, "rank": 0}
        sampler = KeyedSampler(dataset, shuffle=True, seed=self.seed, drop_last=True, **shares)
        if len(sampler) < self.batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must not exceed the {len(sampler)} training samples of a rank, "
                f"since incomplete batches are left out; the training split has {len(dataset)}"
            )
        return ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=True,
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

    def _plain_loader(self, split: str) -> DataLoader:
        return DataLoader(self.dataset(split), batch_size=self.batch_size, num_workers=self.num_workers)
