"""Running a module as at test time, in the middle of its training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode without gradients, and every part of it back into its own mode afterwards.

    ``module.train()`` would not do: it also wakes the parts that are kept frozen in evaluation mode.

    Example:
        >>> layer = nn.Dropout()
        >>> with evaluation_mode(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
