"""What the strategies ask of a LightningModule; nothing else of it is used, and nothing is required."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class NamesUncompressed(Protocol):
    """A module that knows of gradients which compression would hurt, such as those of unembeddings."""

    def uncompressed_parameters(self) -> Sequence[str]:
        """Names of parameters, or shell-style patterns of names."""
        ...
