"""Sampling of tokens from logits, and noise on tokens."""

import hashlib
import math

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def keyed_uniforms(key: tuple[int, ...], count: int) -> Float64[Tensor, " count"]:
    """`count` uniforms of [0, 1) that are a pure function of `key`: the same on every machine, device and batch.

    53 random bits each, read from SHAKE-256 of the key; the first uniforms of a longer draw are those of a shorter one.
    """
    digest = hashlib.shake_256(repr(key).encode()).digest(8 * count)
    if count == 0:
        return torch.empty(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(digest), dtype=torch.int64) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


def check_sampling(
    vocabulary_size: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Raises for arguments that no distribution can be made of.

    Raises:
        ValueError: If the temperature is not positive and finite, or `top_k` or `top_p` out of range.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature ({temperature}) must be positive and finite; top_k=1 takes the likeliest token")
    if top_k is not None and not 1 <= top_k <= vocabulary_size:
        raise ValueError(f"top_k ({top_k}) must be in 1..{vocabulary_size} (the vocabulary), or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be in (0, 1], or None for all tokens")


def sample_tokens(
    logits: Float[Tensor, "batch vocabulary"],
    uniforms: Float64[Tensor, " batch"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Tensor, " batch"]:
    """Return one token per row by inverting the cumulative distribution at `uniforms`, in float64.

    `top_k` keeps the likeliest tokens (of equals the lower ids), then `top_p` the fewest whose probability reaches it.
    Tokens stay in the order of their ids, so rounding of the logits moves a draw only at an interval's very edge.

    Raises:
        ValueError: As `check_sampling`.
    """
    check_sampling(logits.shape[-1], temperature, top_k, top_p)
    logits = logits.double()
    # The largest is subtracted before the division, so that no temperature overflows.
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_k is not None or top_p is not None:
        probabilities = probabilities * _likeliest(probabilities, top_k, top_p)
    cumulative = probabilities.cumsum(-1)
    threshold = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    # u < 1, but u * total may round up to the total: the last token with probability takes it.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, threshold, right=True), last).squeeze(-1)


def _likeliest(probabilities: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Mask of the tokens that both filters keep."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        kept[:, top_k:] = False
    if top_p is not None:
        ordered = ordered * kept
        before = ordered.cumsum(-1) - ordered
        kept &= before < top_p * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def replace_tokens(
    tokens: Int[Tensor, "*shape"], share: float, vocabulary_size: int, generator: torch.Generator
) -> Int[Tensor, "*shape"]:
    """Return a copy in which each token is, with probability `share`, one drawn uniformly from the whole vocabulary.

    Args:
        generator: Generator of the tokens' device.
    """
    drawn = torch.randint(vocabulary_size, tokens.shape, generator=generator, device=tokens.device)
    replaced = torch.rand(tokens.shape, generator=generator, device=tokens.device) < share
    return torch.where(replaced, drawn, tokens)
