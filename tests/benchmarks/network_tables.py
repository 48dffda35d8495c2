"""Tables of a training step, and of the generation of an image's tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.token_sampling import keyed_uniforms, sample_tokens
from lightning_dalle.sampling.autoregressive import decode_image_tokens
from tests.benchmarks.dense_baselines import DenselyCachedTransformer, dense_causal_twin
from tests.benchmarks.table import Table, milliseconds, times_faster
from tests.benchmarks.timing import interleaved_medians, seconds_of


@dataclass(frozen=True)
class NetworkSizes:
    config: SparseTransformerConfig
    grids: tuple[int, ...] = (32, 64)
    batch: int = 2
    num_candidates: int = 16
    stretches: int = 8
    rounds: int = 3
    step_rounds: int = 7


PAPER_LIKE = NetworkSizes(SparseTransformerConfig(depth=8, num_heads=8, text_tokens=254))
STEP_GOALS = {32: "1.15x", 64: "1.5x"}


def step_table(sizes: NetworkSizes) -> Table:
    config = sizes.config
    table = Table(
        "A whole training step",
        f"Forward, loss, backward and fused AdamW of a transformer of width {config.width} and depth {config.depth} in "
        f"the paper's layer order, vocabularies of {config.text_vocabulary_size} and {config.image_vocabulary_size}, "
        f"{config.text_tokens} text tokens, batch {sizes.batch}, fp32. Dense: causal `scaled_dot_product_attention`.",
        ("grid", "ms", "dense ms", "faster", "goal"),
    )
    for grid in sizes.grids:
        network = SparseTransformer(replace(config, grid_height=grid, grid_width=grid))
        works = {
            name: _training_step(version, sizes.batch)
            for name, version in (("sparse", network), ("dense", dense_causal_twin(network)))
        }
        seconds = interleaved_medians(works, sizes.step_rounds)
        times = [milliseconds(seconds[name]) for name in works]
        faster = times_faster(seconds["dense"], seconds["sparse"])
        table.rows.append((f"{grid}x{grid}", *times, faster, STEP_GOALS.get(grid, "")))
    return table


def _training_step(network: SparseTransformer, batch: int) -> Callable[[], None]:
    config, generator = network.config, torch.Generator().manual_seed(0)
    text = torch.randint(1, config.text_vocabulary_size, (batch, config.text_tokens), generator=generator)
    image = torch.randint(config.image_vocabulary_size, (batch, config.image_tokens), generator=generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        text_logits, image_logits = network(text, image)
        text_loss, image_loss = (
            cross_entropy(logits.flatten(0, 1), tokens.flatten())
            for logits, tokens in ((text_logits, text), (image_logits, image))
        )
        (text_loss / 8 + image_loss * 7 / 8).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoding_table(sizes: NetworkSizes) -> Table:
    network = SparseTransformer(sizes.config).eval()
    densely_cached = DenselyCachedTransformer(sizes.config).eval()
    densely_cached.load_state_dict(network.state_dict())
    text = torch.arange(1, sizes.config.text_tokens + 1).unsqueeze(0) % sizes.config.text_vocabulary_size
    drawn: dict[str, Tensor] = {}

    def decode(name: str, version: SparseTransformer) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn[name] = decode_image_tokens(version, text, num_candidates=sizes.num_candidates, generator=generator)

    versions = {"sparse": network, "dense": densely_cached}
    works = {name: partial(decode, name, version) for name, version in versions.items()}
    seconds = interleaved_medians(works, sizes.rounds)
    recomputing, recomputed, expected = _recompute(network, text, drawn["sparse"][0], sizes.stretches)
    return Table(
        f"Generating {sizes.config.image_tokens} tokens of {sizes.num_candidates} candidates of one caption",
        f"The network of the step above at {sizes.config.grid_height}x{sizes.config.grid_width}, fp32. Dense caches "
        "keep and read every position of every candidate. Recomputing runs text and image so far of every candidate "
        f"again for each token, timed in the middle of {sizes.stretches} equal stretches.",
        ("way", "seconds", "ours is faster by", "goal", "MB of caches", "same tokens"),
        [
            ("ours", f"{seconds['sparse']:.1f}", "", "", f"{_cache_megabytes(network, text, sizes):.0f}", ""),
            (
                "dense caches",
                f"{seconds['dense']:.1f}",
                times_faster(seconds["dense"], seconds["sparse"]),
                "1.3x",
                f"{_cache_megabytes(densely_cached, text, sizes):.0f}",
                _share_of_equal(drawn["sparse"], drawn["dense"]),
            ),
            (
                "recomputing",
                f"{recomputing:.0f}",
                times_faster(recomputing, seconds["sparse"]),
                "20x",
                "0",
                _share_of_equal(recomputed, expected),
            ),
        ],
    )


@torch.no_grad()
def _recompute(
    network: SparseTransformer, text: Tensor, tokens: Tensor, stretches: int
) -> tuple[float, Tensor, Tensor]:
    """Seconds that all tokens would take, and the tokens drawn in the middle of each stretch beside the given ones."""
    config, seed = network.config, int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(0)))
    keys = [(seed, *text[0].tolist(), 0, candidate) for candidate in range(len(tokens))]
    uniforms = torch.stack([keyed_uniforms(key, config.image_tokens) for key in keys])
    rows = [config.grid_height * (2 * stretch + 1) // (2 * stretches) for stretch in range(stretches)]
    total, drawn = 0.0, []
    for index in (row * config.grid_width for row in rows):

        def draw(index: int = index) -> None:
            logits, _ = network.start_decoding(text.expand(len(tokens), -1), tokens[:, :index])
            drawn.append(sample_tokens(logits, uniforms[:, index]))

        total += seconds_of(draw) * config.image_tokens / stretches
    return total, torch.stack(drawn, 1), tokens[:, [row * config.grid_width for row in rows]]


@torch.no_grad()
def _cache_megabytes(network: SparseTransformer, text: Tensor, sizes: NetworkSizes) -> float:
    candidates = torch.zeros(sizes.num_candidates, dtype=torch.long)
    return sum(cache.select(candidates).num_bytes for cache in network.start_decoding(text)[1]) / 1e6


def _share_of_equal(first: Tensor, second: Tensor) -> str:
    return f"{(first == second).sum()} of {first.numel()}"
