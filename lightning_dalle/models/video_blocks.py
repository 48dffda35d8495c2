"""Residual blocks of the video diffusion transformer."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.utils.checkpoint import checkpoint

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.rope import Pairing, RotaryEmbedding, rotate

EPSILON = 1e-6


def select_rows(
    modulation: Float[Tensor, "groups parts width"], groups: Int[Tensor, "batch tokens"] | None
) -> tuple[Float[Tensor, "batch #tokens width"], ...]:
    """The parts of a modulation, such as shift, scale and gate, for each token.

    Args:
        groups: Row that each token goes by; None where each row of the batch has its own.
    """
    if groups is None:
        return modulation.unsqueeze(1).unbind(2)
    # Its backward pass adds rows, where that of indexing by a tensor is serial on the CPU.
    return modulation.index_select(0, groups.flatten()).unflatten(0, groups.shape).unbind(2)


def timestep_embedding(times: Float[Tensor, " times"], num_features: int) -> Float[Tensor, "times num_features"]:
    """Cosines of times at falling frequencies, then their sines."""
    half = num_features // 2
    # Of 1,000 steps of noise, as such networks count them.
    frequencies = torch.exp(-math.log(10000) / half * torch.arange(half, device=times.device))
    angles = 1000 * times.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def modulated_norm(
    hidden: Float[Tensor, "batch tokens width"],
    shift: Float[Tensor, "batch #tokens width"],
    scale: Float[Tensor, "batch #tokens width"],
) -> Float[Tensor, "batch tokens width"]:
    """Layer normalisation without gain, then times 1 + scale, plus shift (Peebles & Xie 2023, adaLN)."""
    return torch.addcmul(shift, layer_norm(hidden, hidden.shape[-1:], eps=EPSILON), 1 + scale)


class VideoAttention(nn.Module):
    """Attention of tokens to each other, or to a context, with normalised queries and keys.

    Args:
        fused: Queries come from the same features as keys and values, and from one projection with them.
    """

    def __init__(self, num_heads: int, head_dim: int, fused: bool) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.num_heads, self.fused = num_heads, fused
        if fused:
            self.query_key_value = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key_value = nn.Linear(width, 2 * width)
        self.query_norm = nn.RMSNorm(width, EPSILON)
        self.key_norm = nn.RMSNorm(width, EPSILON)
        self.output = nn.Linear(width, width)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens width"],
        context: Float[Tensor, "batch text width"] | None,
        segments: PackedSegments,
        rotation: RotaryEmbedding | None,
        pairing: Pairing,
    ) -> Float[Tensor, "batch tokens width"]:
        """Attends to the context if there is one, else within the sequence.

        Args:
            rotation: Turns queries and keys, before the one call of attention.
        """
        if context is None:
            query, key, value = self.query_key_value(hidden).chunk(3, dim=-1)
        else:
            query, (key, value) = self.query(hidden), self.key_value(context).chunk(2, dim=-1)
        # Norms stay in the gains' type, which autocast does not see to.
        query = self._heads(self.query_norm(query.to(self.query_norm.weight.dtype)))
        key = self._heads(self.key_norm(key.to(self.key_norm.weight.dtype)))
        if rotation is not None:
            query, key = rotate(query, rotation, pairing), rotate(key, rotation, pairing)
        attended = attend(query.to(value.dtype), key.to(value.dtype), self._heads(value), segments)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [batch, heads, tokens, head_dim]


class VideoBlock(nn.Module):
    """Attention among tokens, attention to the captions unless these are among them, and a GELU network.

    The first and last are modulated by time, and the second is not, as in Wan 2.1 (Wan Team 2025, section 4.2.1). One
    projection of the time serves all blocks, to which each adds an offset of its own.

    Args:
        kinds: Of tokens, with an offset each: video, and text where it is among them.
    """

    def __init__(self, num_heads: int, head_dim: int, feed_forward_width: int, kinds: int, pairing: Pairing) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.pairing: Pairing = pairing
        self.modulation = nn.Parameter(torch.zeros(kinds, 6, width))
        self.attention = VideoAttention(num_heads, head_dim, fused=True)
        self.text_norm = nn.LayerNorm(width, EPSILON) if kinds == 1 else None
        self.text_attention = VideoAttention(num_heads, head_dim, fused=False) if kinds == 1 else None
        self.fc1 = nn.Linear(width, feed_forward_width)
        self.fc2 = nn.Linear(feed_forward_width, width)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens width"],
        context: Float[Tensor, "batch text width"],
        modulation: Float[Tensor, "groups 6 width"],
        rotation: RotaryEmbedding,
        groups: Int[Tensor, "batch tokens"] | None,
        segments: PackedSegments,
        text_segments: PackedSegments,
    ) -> Float[Tensor, "batch tokens width"]:
        """The tokens after all residual steps; arguments as of `VideoTrunk`."""
        offsets = (self.modulation.unsqueeze(1) + modulation).flatten(0, 1)  # [kinds * groups, 6, width]
        shift, scale, gate, last_shift, last_scale, last_gate = select_rows(offsets, groups)
        attended = self.attention(modulated_norm(hidden, shift, scale), None, segments, rotation, self.pairing)
        hidden = torch.addcmul(hidden, gate, attended)
        if self.text_norm is not None and self.text_attention is not None:
            hidden = hidden + self.text_attention(self.text_norm(hidden), context, text_segments, None, self.pairing)
        expanded = self.fc1(modulated_norm(hidden, last_shift, last_scale))
        return torch.addcmul(hidden, last_gate, self.fc2(gelu(expanded, approximate="tanh")))


class VideoTrunk(nn.Module):
    """All blocks, one after another. What a token needs comes with it, so that a part of a sequence needs no more.

    Args:
        blocks: Made by the caller.
        activation_checkpointing: Recompute each block in the backward pass.
    """

    def __init__(self, blocks: Iterable[VideoBlock], pairing: Pairing, activation_checkpointing: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.pairing: Pairing = pairing
        self.activation_checkpointing = activation_checkpointing

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens width"],
        context: Float[Tensor, "batch text width"],
        modulation: Float[Tensor, "groups 6 width"],
        cos: Float[Tensor, "#batch tokens half"],
        sin: Float[Tensor, "#batch tokens half"],
        groups: Int[Tensor, "batch tokens"] | None,
        segments: PackedSegments,
        text_segments: PackedSegments,
    ) -> Float[Tensor, "batch tokens width"]:
        """The tokens after all blocks.

        Args:
            context: Captions.
            modulation: Of each time.
            cos: Of the angles of each token's position.
            groups: Row of the modulation that each token goes by, where those of the second kind of tokens follow those
                of the first; None where each row of the batch has its own.
            segments: Which tokens attend to each other, in the whole sequence.
            text_segments: Which captions the tokens attend to.
        """
        rotation = RotaryEmbedding(cos, sin).for_many(self.pairing)
        arguments = context, modulation, rotation, groups, segments, text_segments
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, *arguments, use_reentrant=False)
            else:
                hidden = block(hidden, *arguments)
        return hidden
