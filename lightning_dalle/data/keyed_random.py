"""Randomness as a function of where it is used: nothing to save, nothing to restore."""

import numpy as np


def check_seed(seed: int) -> int:
    """The seed, if it can key a generator.

    Raises:
        ValueError: it is negative.
    """
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be at least 0: it is mixed with epoch and index as unsigned words")
    return seed


def keyed_numpy_generator(*key: int) -> np.random.Generator:
    """A generator whose stream depends on the key alone; streams of different keys are independent.

    Args:
        key: Numbers of at least 0, such as (seed, epoch, index, purpose).
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
