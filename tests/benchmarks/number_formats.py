"""What each operation takes in float32 and in 16 bits on this CPU: the numbers of docs/number_formats.md.

    python -m tests.benchmarks.number_formats

Prints Markdown tables. Sizes are those of the small recipes. Formats are timed in turn, so that a ratio is to be
trusted more than a time. Networks have weights in 32 bits and run under autocast, as under `precision='bf16-mixed'`;
all else is given tensors of the format. What is called ours chooses the format of its arithmetic itself.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import open_clip
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from lightning_dalle.commands.recipes import packaged_recipes
from lightning_dalle.distributed.powersgd.comm import WIRE_FORMATS, WireFormat
from lightning_dalle.distributed.powersgd.compressor import orthonormal_basis, tall_product
from lightning_dalle.lightning_modules.configuration import as_config
from lightning_dalle.models.contrastive import ContrastiveConfig
from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.models.video_autoencoder import CausalVideoAutoencoder, CausalVideoAutoencoderConfig
from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.kernels import BlockMask, attend_block
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.hardware import has_fast_bfloat16, has_fast_float16, product_dtype
from lightning_dalle.optim.muon import orthogonalise
from tests.benchmarks.__main__ import machine
from tests.benchmarks.recipe_updates import read_recipe
from tests.benchmarks.table import Table, milliseconds
from tests.benchmarks.timing import interleaved_medians

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Operation = Callable[[torch.dtype], Callable[[], object]]
WIRE_NUMBERS = 2**20


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def of_tensors(function: Callable[..., Tensor], *shapes: tuple[int, ...], backward: bool = False) -> Operation:
    """A function of tensors of the format, with its backward pass or without gradients."""

    def prepare(dtype: torch.dtype) -> Callable[[], object]:
        tensors = [noise(*shape, dtype=dtype).requires_grad_(backward) for shape in shapes]
        ones = torch.ones_like(function(*tensors))
        if backward:
            return lambda: torch.autograd.grad(function(*tensors), tensors, ones)
        return partial(function, *tensors)

    return prepare


def of_network(network: nn.Module, function: Callable[..., Any], *inputs: Tensor, backward: bool = True) -> Operation:
    """A method of a network under autocast, with its backward pass or without gradients."""

    def prepare(dtype: torch.dtype) -> Callable[[], object]:
        def run() -> None:
            with torch.set_grad_enabled(backward), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                results = function(*inputs)
            if backward:
                sum(part.float().square().mean() for part in _tuple(results)).backward()
                network.zero_grad()

        return run

    return prepare


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def sizes(recipe: str, kind: type[Any]) -> Any:
    return as_config(kind, read_recipe(packaged_recipes()[recipe])["model"]["init_args"]["network"], "network")


def operations() -> dict[str, Operation]:
    transformer_sizes: SparseTransformerConfig = sizes("shapes/text_to_image", SparseTransformerConfig)
    width, heads, head_dim = transformer_sizes.width, transformer_sizes.num_heads, transformer_sizes.head_dim
    length = transformer_sizes.pattern(0).length
    transformer = SparseTransformer(transformer_sizes)
    text = torch.ones(4, transformer_sizes.text_tokens, dtype=torch.long)
    image = torch.zeros(4, transformer_sizes.image_tokens, dtype=torch.long)
    linear, tokens = nn.Linear(width, 4 * width), noise(16 * length, width)
    discrete_vae_sizes = dataclasses.replace(sizes("openmoji/discrete_vae", DiscreteVAEConfig), patch_codebook=False)
    discrete_vae = DiscreteVAE(discrete_vae_sizes).to(memory_format=torch.channels_last)
    images = noise(1, 3, discrete_vae_sizes.image_size, discrete_vae_sizes.image_size).sigmoid()
    autoencoder = CausalVideoAutoencoder(sizes("moving_shapes/video_autoencoder", CausalVideoAutoencoderConfig))
    clip_sizes: ContrastiveConfig = sizes("openmoji/contrastive", ContrastiveConfig)
    clip = open_clip.CLIP(**clip_sizes.model_config(300))
    captions = torch.ones(64, clip_sizes.text_tokens, dtype=torch.long)
    dense = (16, heads, length, head_dim)
    pattern = AttentionPattern("row", transformer_sizes.text_tokens, 16, 16)
    tiled = (4, heads, pattern.length, head_dim)
    one, kept = (128, heads, 1, head_dim), (128, heads, 40, head_dim)
    matrix, thin = (4 * width, width), (width, 4)
    causal = partial(scaled_dot_product_attention, is_causal=True)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, pattern)

    def decoding_step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_block(query, key, value, mask=BlockMask())[0]

    def thin_product_of_ours(matrix: Tensor, factor: Tensor) -> Tensor:
        number_format = product_dtype(matrix.dtype, matrix.device)
        return tall_product(matrix.to(number_format), factor.to(number_format))

    return {
        "matrix product 512 x 512": of_tensors(torch.mm, (512, 512), (512, 512)),
        "batched product, 64 of 64 x 64": of_tensors(torch.bmm, (64, 64, 64), (64, 64, 64)),
        "linear layer, forward": of_network(linear, linear, tokens, backward=False),
        "linear layer, forward and backward": of_network(linear, linear, tokens),
        "discrete VAE's encoder (2-d convolutions), forward and backward": of_network(
            discrete_vae, discrete_vae.encode_logits, images
        ),
        "video autoencoder's encoder (3-d convolutions), forward and backward": of_network(
            autoencoder, autoencoder.encode_pixels, noise(1, 3, 9, 32, 32)
        ),
        "text tower of open_clip, forward and backward": of_network(clip, clip.encode_text, captions),
        "text-to-image transformer, forward and backward": of_network(transformer, transformer, text, image),
        "text-to-image transformer, forward": of_network(transformer, transformer, text, image, backward=False),
        "torch's fused attention, forward": of_tensors(causal, *[dense] * 3),
        "torch's fused attention, forward and backward": of_tensors(causal, *[dense] * 3, backward=True),
        "our attention under a row pattern, forward": of_tensors(ours, *[tiled] * 3),
        "our attention under a row pattern, forward and backward": of_tensors(ours, *[tiled] * 3, backward=True),
        "our step of decoding, 128 candidates": of_tensors(decoding_step, one, kept, kept),
        "thin product": of_tensors(tall_product, matrix, thin),
        "our thin product, as of PowerSGD": of_tensors(thin_product_of_ours, matrix, thin),
        "our orthonormal basis, as of PowerSGD": of_tensors(orthonormal_basis, (4 * width, 4)),
        "orthogonalisation, as of Muon": of_tensors(
            lambda batch: orthogonalise(batch, (3.4445, -4.7750, 2.0315), 5, 1e-7), (4, width, 4 * width)
        ),
        "GELU": of_tensors(gelu, (16 * length, width)),
        "layer norm": of_tensors(lambda hidden: layer_norm(hidden, (width,)), (16 * length, width)),
    }


def operations_table(rounds: int) -> Table:
    table = Table(
        "Operations",
        "Milliseconds, and how many times those of float32.",
        ("operation", "float32", "bfloat16", "times", "float16", "times"),
    )
    for name, operation in operations().items():
        works = {format: operation(dtype) for format, dtype in FORMATS.items()}
        seconds = interleaved_medians(works, rounds)
        row = [name, milliseconds(seconds["float32"])]
        for format in ("bfloat16", "float16"):
            row += [milliseconds(seconds[format]), f"{seconds[format] / seconds['float32']:.1f}"]
        table.rows.append(tuple(row))
    return table


def _there_and_back(wire: WireFormat, numbers: Tensor) -> Tensor:
    return wire.decode(wire.encode(numbers))


def wire_table(rounds: int) -> Table:
    numbers = noise(WIRE_NUMBERS)
    works: dict[str, Callable[[], object]] = {"copied": numbers.clone}
    for name, wire in WIRE_FORMATS.items():
        if not wire.is_exact:
            works[name] = partial(_there_and_back, wire, numbers)
    table = Table("Wire formats", f"To the format and back, {WIRE_NUMBERS:,} numbers.", ("format", "ms"))
    for name, seconds in interleaved_medians(works, rounds).items():
        table.rows.append((name, milliseconds(seconds)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"Machine: {machine().removesuffix(', fp32.')}.")
    print(f"has_fast_bfloat16: {has_fast_bfloat16('cpu')}, has_fast_float16: {has_fast_float16('cpu')}\n")
    for table in (operations_table(arguments.rounds), wire_table(5 * arguments.rounds)):
        print(table.markdown(), end="\n\n")


if __name__ == "__main__":
    main()
