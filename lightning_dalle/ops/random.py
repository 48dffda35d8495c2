"""Random numbers keyed by what they are for, equal on any number of processes."""

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def keyed_generator(key: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose stream is a function of the key and of the kind of device.

    Keyed by seed, step and rank, it needs no state in a checkpoint for an exact resume.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") >> 1)


def check_seed(seed: int) -> int:
    """Return the seed if it can key a generator.

    Raises:
        ValueError: If it is negative.
    """
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be at least 0: it is mixed with epoch and index as unsigned words")
    return seed


def keyed_numpy_generator(*key: int) -> np.random.Generator:
    """Return a generator whose stream depends on the key alone; streams of different keys are independent.

    Args:
        key: Numbers of at least 0, such as (seed, epoch, index, purpose).
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


# Of the generator SplitMix64 (Steele, Lea and Flood 2014), as signed integers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)


def dropout_factors(
    dropout: float,
    seed: int,
    sequences: Int[Tensor, "..."],
    queries: Int[Tensor, "..."],
    keys: Int[Tensor, "..."],
    dtype: torch.dtype,
) -> Float[Tensor, "..."]:
    """Return 0 with probability `dropout`, else 1 / (1 - dropout), for pairs of positions that are broadcast together.

    Each factor is a hash of the seed, the number of the sequence (one for each head), the query and the key. So it is
    the same whatever tiles the attention is computed in, and a backward pass draws it again instead of keeping it.

    Args:
        dropout: Probability, in [0, 1).
        seed: Any integer of 64 bits, signed.
    """
    state = mix_bits(torch.tensor(seed, device=queries.device) + (sequences + 1) * _INCREMENT)
    state = mix_bits(state + (queries + 1) * _INCREMENT)
    state = mix_bits(state + (keys + 1) * _INCREMENT)
    threshold = round(dropout * 2**64) - 2**63
    return (state >= threshold).to(dtype).div_(1 - dropout)


def mix_bits(state: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return integers of 64 bits with all bits scrambled, one to one; products wrap around."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # Shifted in zeros: torch's shift of a negative number would copy the sign.
        state = ((state >> shift) & ((1 << (64 - shift)) - 1)).bitwise_xor_(state).mul_(multiplier)
    return state
