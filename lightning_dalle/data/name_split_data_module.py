"""Sets of named samples, of which those with some names are kept for validation."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning_dalle.data.captioned_data_module import CaptionedDataModule
from lightning_dalle.data.split_by_name import check_val_share


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
