"""Random generators that depend on a key alone."""

import hashlib

import torch


def keyed_generator(key: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose stream is a function of the key and of the kind of device.

    Keyed by seed, step and rank, it needs no state in a checkpoint for an exact resume.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") >> 1)
