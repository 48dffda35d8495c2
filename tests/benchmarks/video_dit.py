"""The video transformer against that of diffusers, and packing against padding: `python -m tests.benchmarks.video_dit`.

A training step is forward, backward and AdamW on the same clips; memory is what the forward pass saves for the backward
one. Packing is compared on clips of which half would be padding.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_dalle.models.video_dit import VideoDiT, VideoDiTConfig
from lightning_dalle.ops.rope import RotaryGridConfig
from tests.benchmarks.table import Table, milliseconds, times_faster
from tests.benchmarks.timing import interleaved_medians

with warnings.catch_warnings():
    # What diffusers imports warns of its own age.
    warnings.simplefilter("ignore")
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel


@dataclass(frozen=True)
class VideoSizes:
    config: VideoDiTConfig
    batch: int
    text_tokens: int
    rounds: int


SMALL = VideoSizes(
    VideoDiTConfig(
        depth=4,
        num_heads=4,
        head_dim=64,
        feed_forward_width=1024,
        channels=4,
        text_width=128,
        rotary=RotaryGridConfig(original_max_position_embeddings=(8, 8, 8), axis_dims=(24, 20, 20)),
    ),
    batch=2,
    text_tokens=16,
    rounds=7,
)


def step_table(sizes: VideoSizes) -> Table:
    config = sizes.config
    table = Table(
        "One training step",
        f"Width {config.width}, depth {config.depth}, {sizes.batch} clips of "
        f"{config.rotary.original_max_position_embeddings} tokens each, fp32.",
        ("network", "ms", "ours is faster by", "goal", "MB saved for the backward pass"),
    )
    clips, times, text = _inputs(sizes)
    ours, theirs = VideoDiT(config), _theirs(config)
    forwards: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "ours": (ours, lambda: ours(clips, times, text)),
        "diffusers": (theirs, lambda: theirs(clips, 1000 * times, text, return_dict=False)[0]),
    }
    works = {name: _training_step(*forward) for name, forward in forwards.items()}
    seconds = interleaved_medians(works, sizes.rounds)
    for name, (_, forward) in forwards.items():
        goal = ("1.00x", times_faster(seconds["diffusers"], seconds["ours"])) if name == "ours" else ("", "")
        table.rows.append((name, milliseconds(seconds[name]), goal[1], goal[0], f"{_saved_megabytes(forward):.0f}"))
    return table


def packing_table(sizes: VideoSizes) -> Table:
    config = sizes.config
    table = Table(
        "Packing",
        "One long clip and others short enough that half of the padded tokens are padding; a training step.",
        ("way", "tokens", "ms", "faster", "goal"),
    )
    frames, rows, columns = config.rotary.original_max_position_embeddings
    sides = [rows * config.patch_size[1], columns * config.patch_size[2]]
    _, times, text = _inputs(replace(sizes, batch=4))
    lengths = (frames, *(max(1, frames * eighths // 8) for eighths in (3, 3, 2)))
    clips = [torch.randn(config.channels, length, *sides) for length in lengths]
    padded = torch.randn(4, config.channels, frames, *sides)
    networks = {"packed": VideoDiT(config), "padded": VideoDiT(config)}
    works = {
        "packed": _training_step(networks["packed"], lambda: _concatenated(networks["packed"](clips, times, text))),
        "padded": _training_step(networks["padded"], lambda: networks["padded"](padded, times, text)),
    }
    seconds = interleaved_medians(works, sizes.rounds)
    tokens = {"packed": sum(lengths) * rows * columns, "padded": 4 * frames * rows * columns}
    for name in works:
        faster = (times_faster(seconds["padded"], seconds["packed"]), "1.3x") if name == "packed" else ("", "")
        table.rows.append((name, str(tokens[name]), milliseconds(seconds[name]), *faster))
    return table


def _inputs(sizes: VideoSizes) -> tuple[Tensor, Tensor, Tensor]:
    config = sizes.config
    size = [
        length * patch
        for length, patch in zip(config.rotary.original_max_position_embeddings, config.patch_size, strict=True)
    ]
    clips = torch.randn(sizes.batch, config.channels, *size)
    return clips, torch.rand(sizes.batch), torch.randn(sizes.batch, sizes.text_tokens, config.text_width)


def _theirs(config: VideoDiTConfig) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=config.patch_size,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.channels,
        out_channels=config.channels,
        text_dim=config.text_width,
        freq_dim=config.time_features,
        ffn_dim=config.feed_forward_width,
        num_layers=config.depth,
        cross_attn_norm=True,
    )


def _training_step(network: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)

    def step() -> None:
        forward().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _saved_megabytes(forward: Callable[[], Tensor]) -> float:
    """Storage that the graph keeps, each once; parameters are among it in both networks."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(storages.values()) / 1e6


def _concatenated(clips: list[Tensor]) -> Tensor:
    return torch.cat([clip.flatten() for clip in clips])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=SMALL.rounds, help="times that each step is measured")
    sizes = replace(SMALL, rounds=parser.parse_args().rounds)
    torch.manual_seed(0)
    console = Console()
    for table in (step_table(sizes), packing_table(sizes)):
        table.show(console)


if __name__ == "__main__":
    main()
