"""Splits that depend on names alone: the same on every machine, and stable when a set grows."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


def hash_unit(text: str) -> float:
    """Return a uniform number of [0, 1) that depends on the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def validation_mask(names: Sequence[str], val_share: float) -> Bool[np.ndarray, " names"]:
    """Return which samples are for validation: those whose name's hash is below the share, at least one, never all.

    Raises:
        ValueError: there are fewer than two samples.
    """
    if len(names) < 2:
        raise ValueError(f"{len(names)} samples cannot be split: training and validation need one each")
    hashes = np.array([hash_unit(name) for name in names])
    mask = hashes < val_share
    mask[hashes.argmin()] = True
    mask[hashes.argmax()] = False
    return mask


def split_indices(names: Sequence[str], val_share: float) -> dict[str, Int[np.ndarray, " samples"]]:
    """Return places of the samples of `train`, `val`, and `all`, both together, in their order.

    Raises:
        ValueError: there are fewer than two samples.
    """
    validation = validation_mask(names, val_share)
    masks = {"train": ~validation, "val": validation, "all": np.ones_like(validation)}
    return {split: np.flatnonzero(mask) for split, mask in masks.items()}


def check_val_share(val_share: float) -> float:
    """Return the share, if it leaves something to train on.

    Raises:
        ValueError: it is outside of (0, 1).
    """
    if not 0 < val_share < 1:
        raise ValueError(f"val_share ({val_share}) must be above 0 and below 1, such as 0.05")
    return val_share
