"""Cached decoding against the network run from scratch for each token."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.token_sampling import keyed_uniforms, sample_tokens
from lightning_dalle.sampling.autoregressive import decode_image_tokens

CONFIG = SparseTransformerConfig(
    depth=4,
    num_heads=2,
    head_dim=8,
    text_tokens=6,
    text_vocabulary_size=20,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=16,
    convolution_kernel_size=3,
)


@pytest.fixture(scope="module")
def network() -> SparseTransformer:
    torch.manual_seed(0)
    network = SparseTransformer(CONFIG)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


@pytest.fixture
def text() -> torch.Tensor:
    tokens = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(1))
    tokens[0, 3:] = 0
    return tokens


@pytest.fixture
def prime() -> torch.Tensor:
    return torch.randint(0, 16, (3, 8), generator=torch.Generator().manual_seed(2))


def _generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def _decode_uncached(
    network: SparseTransformer,
    text: torch.Tensor,
    num_candidates: int,
    guidance_scale: float = 1.0,
    prime_tokens: torch.Tensor | None = None,
    **filters: Any,
) -> torch.Tensor:
    """Runs the whole network for each token."""
    seed = int(torch.randint(2**63 - 1, (), generator=_generator()))
    captions = [(caption, candidate) for caption in range(len(text)) for candidate in range(num_candidates)]
    keys = [(seed, *text[caption].tolist(), 0, candidate) for caption, candidate in captions]
    uniforms = torch.stack([keyed_uniforms(key, CONFIG.image_tokens) for key in keys])
    text = text.repeat_interleave(num_candidates, 0)
    image = torch.zeros(len(text), CONFIG.image_tokens, dtype=torch.long)
    primed = 0 if prime_tokens is None else prime_tokens.shape[1]
    if prime_tokens is not None:
        image[:, :primed] = prime_tokens.repeat_interleave(num_candidates, 0)
    for index in range(primed, CONFIG.image_tokens):
        logits = network(text, image)[1][:, index].double()
        empty = network(torch.zeros_like(text), image)[1][:, index].double()
        guided = empty + guidance_scale * (logits - empty)
        image[:, index] = sample_tokens(guided, uniforms[:, index], **filters)
    return image.unflatten(0, (-1, num_candidates))


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0, 0.0])
@pytest.mark.parametrize("primed", [False, True])
def test_cached_decoding_draws_the_tokens_of_uncached_decoding(
    network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor, guidance_scale: float, primed: bool
) -> None:
    options: dict[str, Any] = {"guidance_scale": guidance_scale, "prime_tokens": prime if primed else None}
    cached = decode_image_tokens(network, text, num_candidates=3, generator=_generator(), **options)
    assert torch.equal(cached, _decode_uncached(network, text, 3, **options))


def test_guidance_changes_the_tokens(network: SparseTransformer, text: torch.Tensor) -> None:
    drawn = [
        decode_image_tokens(network, text, guidance_scale=scale, generator=_generator()) for scale in (0.0, 1.0, 3.0)
    ]
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn}) == 3


def test_filters_reach_the_decoding(network: SparseTransformer, text: torch.Tensor) -> None:
    filters: dict[str, Any] = {"temperature": 1.5, "top_k": 5, "top_p": 0.8}
    cached = decode_image_tokens(network, text, num_candidates=2, generator=_generator(), **filters)
    assert torch.equal(cached, _decode_uncached(network, text, 2, **filters))
    assert not torch.equal(cached, decode_image_tokens(network, text, num_candidates=2, generator=_generator()))


def test_candidates_do_not_depend_on_the_rest_of_the_batch(network: SparseTransformer, text: torch.Tensor) -> None:
    together = decode_image_tokens(network, text, num_candidates=4, generator=_generator(), guidance_scale=2.0)
    alone = decode_image_tokens(network, text[2:], num_candidates=2, generator=_generator(), guidance_scale=2.0)
    assert torch.equal(together[2:, :2], alone)
    flipped = decode_image_tokens(network, text.flip(0), num_candidates=4, generator=_generator(), guidance_scale=2.0)
    assert torch.equal(flipped.flip(0), together)


@pytest.mark.parametrize("max_batch", [1, 5, 100])
def test_candidates_do_not_depend_on_max_batch(
    network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor, max_batch: int
) -> None:
    options: dict[str, Any] = {"num_candidates": 4, "guidance_scale": 2.0, "prime_tokens": prime}
    expected = decode_image_tokens(network, text, generator=_generator(), **options)
    assert torch.equal(
        decode_image_tokens(network, text, generator=_generator(), max_batch=max_batch, **options), expected
    )


def test_equal_captions_of_one_batch_get_different_candidates(network: SparseTransformer, text: torch.Tensor) -> None:
    decoded = decode_image_tokens(network, text[[0, 0]], num_candidates=2, generator=_generator())
    assert torch.equal(decoded[0], decode_image_tokens(network, text[:1], num_candidates=2, generator=_generator())[0])
    assert len({tuple(tokens) for tokens in decoded.flatten(0, 1).tolist()}) == 4


def test_generator_alone_decides(network: SparseTransformer, text: torch.Tensor) -> None:
    first, again, other = (
        decode_image_tokens(network, text, generator=_generator(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other
    torch.manual_seed(9)
    from_global = decode_image_tokens(network, text).tolist()
    torch.manual_seed(9)
    assert decode_image_tokens(network, text).tolist() == from_global


def test_prime_is_kept_in_front(network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor) -> None:
    decoded = decode_image_tokens(network, text, num_candidates=2, prime_tokens=prime, generator=_generator())
    assert torch.equal(decoded[:, :, :8], prime[:, None].expand(-1, 2, -1))


def test_prefix_runs_once_per_caption(
    network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    start_decoding = network.start_decoding

    def counted(text_tokens: torch.Tensor, prime_tokens: torch.Tensor | None) -> Any:
        batches.append(len(text_tokens))
        return start_decoding(text_tokens, prime_tokens)

    monkeypatch.setattr(network, "start_decoding", counted)
    decode_image_tokens(network, text, num_candidates=7, prime_tokens=prime, max_batch=4)
    decode_image_tokens(network, text, num_candidates=7, guidance_scale=2.0)
    assert batches == [3, 6]


def test_progress_counts_every_drawn_token(network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor) -> None:
    drawn: list[int] = []
    decode_image_tokens(network, text, num_candidates=3, max_batch=4, prime_tokens=prime, on_tokens=drawn.append)
    assert sum(drawn) == 3 * 3 * 8


class _Casts(TorchDispatchMode):
    """Counts copies to another type."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_autocast_casts_each_weight_once(network: SparseTransformer, text: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), _Casts() as casts:
        decode_image_tokens(network, text)
    parameters = sum(1 for _ in network.parameters())
    # At most 24 activations a step: inputs of 4 x 4 projections and of the head, 4 shares of the image, the logits.
    assert parameters // 2 < casts.count < parameters + 24 * CONFIG.image_tokens


def test_caller_s_tensors_and_the_network_s_mode_are_left_alone(
    network: SparseTransformer, text: torch.Tensor, prime: torch.Tensor
) -> None:
    before = text.clone(), prime.clone()
    network.train()
    decoded = decode_image_tokens(network, text, num_candidates=2, guidance_scale=3.0, prime_tokens=prime)
    assert torch.equal(text, before[0])
    assert torch.equal(prime, before[1])
    assert network.training
    assert not decoded.is_inference()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature \(0.0\)"),
        ({"top_k": 17}, r"top_k \(17\) must be in 1..16"),
        ({"top_p": 1.1}, r"top_p \(1.1\)"),
        ({"num_candidates": 0}, r"num_candidates \(0\) must be at least 1"),
        ({"max_batch": 0}, r"max_batch \(0\) must be at least 1"),
        ({"guidance_scale": -1.0}, r"guidance_scale \(-1.0\) must be finite and at least 0"),
        ({"guidance_scale": float("nan")}, r"guidance_scale \(nan\)"),
        ({"prime_tokens": torch.zeros(2, 8, dtype=torch.long)}, "prime_tokens has 2 rows for 3 captions"),
        ({"prime_tokens": torch.zeros(3, 7, dtype=torch.long)}, "prime_tokens has 7 tokens"),
    ],
)
def test_bad_arguments_are_named(
    network: SparseTransformer, text: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode_image_tokens(network, text, **options)


def test_no_caption_is_refused(network: SparseTransformer, text: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="text_tokens must hold at least one caption"):
        decode_image_tokens(network, text[:0])


def test_diverged_network_is_refused(text: torch.Tensor) -> None:
    network = SparseTransformer(CONFIG)
    torch.nn.init.constant_(network.image_head.bias, float("nan"))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        decode_image_tokens(network, text)
