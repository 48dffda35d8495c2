"""Weights of diffusers' Wan transformer in ours give what they give there."""

import warnings

import torch
from torch import Tensor

from lightning_dalle.models.video_dit import VideoDiT, VideoDiTConfig
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.rope import RotaryGridConfig, grid_rotation
from tests.rounding import assert_only_rounded

with warnings.catch_warnings():
    # What diffusers imports warns of its own age.
    warnings.simplefilter("ignore")
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

CONFIG = VideoDiTConfig(
    depth=2,
    num_heads=2,
    head_dim=16,
    feed_forward_width=40,
    channels=4,
    text_width=6,
    time_features=8,
    rotary=RotaryGridConfig(original_max_position_embeddings=(3, 2, 3), axis_dims=(8, 4, 4)),
)
# Ours by theirs; of lists, theirs one after another.
OUTER = {
    "patch_embedding": "patch_embedding",
    "text_projection.fc1": "condition_embedder.text_embedder.linear_1",
    "text_projection.fc2": "condition_embedder.text_embedder.linear_2",
    "timestep_embedder.fc1": "condition_embedder.time_embedder.linear_1",
    "timestep_embedder.fc2": "condition_embedder.time_embedder.linear_2",
    "time_modulation": "condition_embedder.time_proj",
    "final_layer.output": "proj_out",
}
BLOCK: dict[str, list[str]] = {
    "attention.query_key_value": ["attn1.to_q", "attn1.to_k", "attn1.to_v"],
    "attention.output": ["attn1.to_out.0"],
    "text_norm": ["norm2"],
    "text_attention.query": ["attn2.to_q"],
    "text_attention.key_value": ["attn2.to_k", "attn2.to_v"],
    "text_attention.output": ["attn2.to_out.0"],
    "fc1": ["ffn.net.0.proj"],
    "fc2": ["ffn.net.2"],
}
GAINS = {"attention.{}_norm": "attn1.norm_{}", "text_attention.{}_norm": "attn2.norm_{}"}


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


def _block_weights(theirs: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    weights = {"modulation": theirs[f"{prefix}scale_shift_table"]}
    for ours, names in BLOCK.items():
        for kind in ("weight", "bias"):
            weights[f"{ours}.{kind}"] = torch.cat([theirs[f"{prefix}{name}.{kind}"] for name in names])
    for ours, name in GAINS.items():
        for whole, short in (("query", "q"), ("key", "k")):
            weights[f"{ours.format(whole)}.weight"] = theirs[f"{prefix}{name.format(short)}.weight"]
    return weights


def _weights(theirs: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    weights = {
        f"{ours}.{kind}": theirs[f"{name}.{kind}"] for ours, name in OUTER.items() for kind in ("weight", "bias")
    }
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"].flatten(1)
    # There features of a patch end with the channel, here they begin with it.
    order = torch.arange(4 * 4).view(4, 4).T.flatten()
    weights["final_layer.output.weight"], weights["final_layer.output.bias"] = (
        weights["final_layer.output.weight"][order],
        weights["final_layer.output.bias"][order],
    )
    weights["final_layer.modulation"] = theirs["scale_shift_table"].squeeze(0)
    for number in range(depth):
        block = _block_weights(theirs, f"blocks.{number}.")
        weights.update({f"trunk.blocks.{number}.{name}": weight for name, weight in block.items()})
    return weights


def _random_theirs() -> WanTransformer3DModel:
    torch.manual_seed(0)
    network = _theirs(CONFIG)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def test_one_block_gives_the_same() -> None:
    theirs = _random_theirs()
    ours = VideoDiT(CONFIG).trunk.blocks[0]
    ours.load_state_dict(_block_weights(theirs.blocks[0].state_dict()))
    hidden, text, times = torch.randn(2, 18, 32), torch.randn(2, 5, 32), torch.randn(2, 6, 32)
    rotation = grid_rotation(CONFIG.rotary, 16, (3, 2, 3), dtype=torch.float32)
    segments = PackedSegments((18,), (18,)), PackedSegments((18,), (5,), of_context=True)
    expected = theirs.blocks[0](hidden, text, times, theirs.rope(torch.empty(2, 4, 3, 4, 6)))
    single = ours(hidden, text, times, rotation, None, *segments)
    # Theirs has parts in single precision whatever its type, so the exact result is ours in double.
    rotation = grid_rotation(CONFIG.rotary, 16, (3, 2, 3), dtype=torch.float64)
    exact = ours.double()(hidden.double(), text.double(), times.double(), rotation, None, *segments)
    assert_only_rounded(expected, single, exact)


def test_whole_network_gives_the_same() -> None:
    theirs = _random_theirs()
    ours = VideoDiT(CONFIG)
    ours.load_state_dict(_weights(theirs.state_dict(), CONFIG.depth))
    clips, times, text = torch.randn(2, 4, 3, 4, 6), torch.rand(2), torch.randn(2, 5, 6)
    expected = theirs(clips, 1000 * times, text, return_dict=False)[0]
    single = ours(clips, times, text)
    assert_only_rounded(expected, single, ours.double()(clips.double(), times.double(), text.double()))


def test_defaults_are_the_published_size() -> None:
    config = VideoDiTConfig(
        rotary=RotaryGridConfig(original_max_position_embeddings=(21, 30, 52), axis_dims=(44, 42, 42))
    )
    with torch.device("meta"):
        ours, theirs = VideoDiT(config), _theirs(config)
    counts = [sum(parameter.numel() for parameter in network.parameters()) for network in (ours, theirs)]
    assert counts == [1_418_996_800] * 2
