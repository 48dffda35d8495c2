"""Decoding of image tokens with cached keys and values."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from lightning_dalle.models.sparse_transformer import SparseTransformer
from lightning_dalle.ops.attention.kv_cache import KeyValueCache
from lightning_dalle.ops.sharded_sequence import sharded_sequences
from lightning_dalle.ops.token_sampling import check_sampling, keyed_uniforms, sample_tokens


def decode_image_tokens(
    network: SparseTransformer,
    text_tokens: Int[Tensor, "captions text"],
    *,
    num_candidates: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    guidance_scale: float = 1.0,
    prime_tokens: Int[Tensor, "primes primed"] | None = None,
    generator: torch.Generator | None = None,
    max_batch: int = 128,
    on_tokens: Callable[[int], None] | None = None,
) -> Int[Tensor, "captions num_candidates image"]:
    """Draw the image tokens of `num_candidates` images per caption.

    Text and prime run once per caption, then all candidates share their keys and values. One seed is drawn from
    `generator`; a candidate's randomness is keyed by it, the caption, the caption's repetition and the candidate's
    number, and so does not depend on the rest of the batch, `max_batch` or caching.

    Args:
        guidance_scale: Classifier-free guidance: logits move from those of the empty caption (0) to those of the
            caption (1) and beyond. Anything but 1 decodes two sequences per candidate.
        prime_tokens: Tokens of the first rows, complete ones; they are kept and returned.
        max_batch: Candidates that are decoded together.
        on_tokens: Called after each step with the number of tokens it drew.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If the network gives logits that are not finite.
    """
    check_sampling(network.config.image_vocabulary_size, temperature, top_k, top_p)
    _check_decoding(len(text_tokens), num_candidates, guidance_scale, prime_tokens, max_batch)
    uniforms = _candidate_uniforms(text_tokens, num_candidates, network.config.image_tokens, _draw_seed(generator))
    draw = partial(sample_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    # Not inference mode, in which autocast would cast every weight again at every step. Sequences are decoded whole.
    with torch.no_grad(), sharded_sequences(None):
        logits, caches = _start(network, text_tokens, prime_tokens, guided=guidance_scale != 1)
        chunks = []
        for candidates in torch.arange(len(uniforms), device=text_tokens.device).split(max_batch):
            captions = candidates // num_candidates
            rows = captions if guidance_scale == 1 else torch.cat([captions, captions + len(text_tokens)])
            selected = logits[rows], [cache.select(rows) for cache in caches]
            drawn = _decode_rows(network, *selected, uniforms[candidates], draw, guidance_scale, on_tokens)
            chunks.append(drawn if prime_tokens is None else torch.cat([prime_tokens[captions], drawn], dim=1))
    return torch.cat(chunks).view(len(text_tokens), num_candidates, -1)


def _start(
    network: SparseTransformer, text_tokens: Tensor, prime_tokens: Tensor | None, guided: bool
) -> tuple[Tensor, list[KeyValueCache]]:
    """Run each caption's prefix; if guided, the empty caption's after them, one for each (a prime may differ)."""
    if guided:
        text_tokens = torch.cat([text_tokens, torch.zeros_like(text_tokens)])
        prime_tokens = None if prime_tokens is None else torch.cat([prime_tokens, prime_tokens])
    logits, caches = network.start_decoding(text_tokens, prime_tokens)
    if not logits.isfinite().all():
        raise RuntimeError("the network's logits are not finite: its weights have diverged; load an earlier checkpoint")
    return logits, caches


def _decode_rows(
    network: SparseTransformer,
    logits: Tensor,
    caches: list[KeyValueCache],
    uniforms: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor],
    guidance_scale: float,
    on_tokens: Callable[[int], None] | None,
) -> Tensor:
    """Draw the tokens that follow the caches' prefix; if guided, the second half of the batch has no captions."""
    first = caches[0].length - (network.config.text_tokens + 2)
    drawn: list[Tensor] = []
    for index in range(first, network.config.image_tokens):
        if drawn:
            repeats = 1 if guidance_scale == 1 else 2
            logits = network.decode_step(drawn[-1].repeat(repeats), caches)
        drawn.append(draw(_guide(logits, guidance_scale), uniforms[:, index]))
        if on_tokens is not None:
            on_tokens(len(uniforms))
    return torch.stack(drawn, dim=1)


def _guide(logits: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return logits
    conditional, unconditional = logits.double().chunk(2)
    return unconditional + scale * (conditional - unconditional)


def _draw_seed(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def _candidate_uniforms(
    text_tokens: Tensor, num_candidates: int, image_tokens: int, seed: int
) -> Float64[Tensor, "candidates image"]:
    """Return one row per candidate, captions outermost; equal captions are told apart by their repetition."""
    seen: Counter[tuple[int, ...]] = Counter()
    rows = []
    for caption in map(tuple, text_tokens.tolist()):
        keys = [(seed, *caption, seen[caption], candidate) for candidate in range(num_candidates)]
        rows += [keyed_uniforms(key, image_tokens) for key in keys]
        seen[caption] += 1
    return torch.stack(rows).to(text_tokens.device)


def _check_decoding(
    num_captions: int, num_candidates: int, guidance_scale: float, prime_tokens: Tensor | None, max_batch: int
) -> None:
    if num_captions < 1:
        raise ValueError("text_tokens must hold at least one caption")
    for name, value in (("num_candidates", num_candidates), ("max_batch", max_batch)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if not (guidance_scale >= 0 and math.isfinite(guidance_scale)):
        raise ValueError(f"guidance_scale ({guidance_scale}) must be finite and at least 0; 1 decodes without guidance")
    if prime_tokens is not None and len(prime_tokens) != num_captions:
        raise ValueError(
            f"prime_tokens has {len(prime_tokens)} rows for {num_captions} captions; give one image per caption"
        )
