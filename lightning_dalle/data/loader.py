"""A training loader that continues in the middle of an epoch.

Lightning stores the state of any loader that offers `state_dict` in its checkpoints. Here it is two numbers: the epoch
and how many batches of it were handed out. All else follows from (seed, epoch, index).
"""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

logger = logging.getLogger(__name__)


class KeyedSampler(DistributedSampler):
    """Shuffled (epoch, index) pairs, so that a dataset can key its randomness; a share of them for each rank.

    As a `DistributedSampler` it is left alone by Lightning, which tells it the epoch. Ranks get equally many: what does
    not divide is left out, a different remainder in each epoch.

    Attributes:
        skip: Samples to leave out at the start of `skip_epoch`, for a run that continues there.
    """

    skip = 0
    skip_epoch = -1

    @property
    def num_skipped(self) -> int:
        """Samples that the current epoch leaves out at its start."""
        return self.skip if self.epoch == self.skip_epoch else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        indices = islice(super().__iter__(), self.num_skipped, None)
        return ((self.epoch, index) for index in indices)


class ResumableLoader(DataLoader):
    """A `DataLoader` over a `KeyedSampler`, whose state is where it stands.

    The count is of batches handed out, not of batches that workers have prepared. Without a `batch_size` the samples
    are batches already, those of `ClipBatches`.
    """

    _epoch = 0
    _num_batches = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing is drawn before the first batch is asked for, when the sampler knows its epoch.
        if isinstance(self.sampler, KeyedSampler):
            self._epoch = self.sampler.epoch
            self._num_batches = self.sampler.num_skipped // (self.batch_size or 1)
        for batch in super().__iter__():
            self._num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, and what its batches are counted in."""
        return {"epoch": self._epoch, "num_batches": self._num_batches, **self._units()}

    def _units(self) -> dict[str, int]:
        own = {"max_tokens": getattr(self.dataset, "max_tokens", 0)}
        batches = own if self.batch_size is None else {"batch_size": self.batch_size}
        return {**batches, "num_replicas": getattr(self.sampler, "num_replicas", 1)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state, once iterated at its epoch."""
        if not isinstance(self.sampler, KeyedSampler):
            logger.warning("the epoch starts again: overfit_batches has replaced the sampler that can continue in it")
            return
        units = self._units()
        if any(state_dict.get(name) != value for name, value in units.items()):
            logger.warning(
                "the checkpoint was written in the middle of an epoch with %s, now %s: "
                "the epoch continues at the same batch number, but with other samples",
                *map(_described, (state_dict, units)),
            )
        self._epoch, self._num_batches = state_dict["epoch"], state_dict["num_batches"]
        self.sampler.skip_epoch = self._epoch
        self.sampler.skip = self._num_batches * (self.batch_size or 1)


def _described(units: dict[str, int]) -> str:
    name = "batch_size" if "batch_size" in units else "max_tokens"
    return f"{name} {units[name]} on {units['num_replicas']} ranks"
