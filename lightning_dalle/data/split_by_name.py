"""Splits that depend on names alone: the same on every machine, and stable when a set grows."""

import hashlib


def hash_unit(text: str) -> float:
    """A uniform number of [0, 1) that depends on the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_validation(name: str, val_share: float) -> bool:
    """Whether a sample of this name is kept for validation."""
    return hash_unit(name) < val_share


def check_val_share(val_share: float) -> float:
    """The share, if it leaves something to train on.

    Raises:
        ValueError: it is outside of (0, 1).
    """
    if not 0 < val_share < 1:
        raise ValueError(f"val_share ({val_share}) must be above 0 and below 1, such as 0.05")
    return val_share
