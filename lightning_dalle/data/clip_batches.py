"""Clips of several sizes, a batch of them at a time."""

from typing import Any

from torch.utils.data import Dataset

from lightning_dalle.data.captioned_clip_dataset import CaptionedClipDataset
from lightning_dalle.data.token_buckets import TokenBuckets


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
