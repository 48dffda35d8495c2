"""Parts of the video diffusion transformer: layout of tokens, conditioning, residual blocks, final layer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, silu
from torch.utils.checkpoint import checkpoint

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rope import Pairing, RotaryEmbedding, apply_rotary_emb

EPSILON = 1e-6


@dataclass(frozen=True)
class ClipLayout:
    """Where the tokens of clips lie: one row for each of clips of one size, or all clips side by side in one row.

        row 0  [text][clip 0]            row 0  [text][clip 0][text][clip 1     ][text][clip 2 ]
        row 1  [text][clip 1]

    Args:
        grids: Tokens along time, height and width; one grid for all rows, or that of each clip in the one row.
        num_text: Tokens of a caption.
        text_in_front: Captions are among the tokens, in front of their clips (joint attention).
    """

    grids: tuple[Grid, ...]
    num_clips: int
    num_text: int
    text_in_front: bool

    @property
    def num_in_front(self) -> int:
        """Tokens of text in front of each clip."""
        return self.num_text if self.text_in_front else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment of a row."""
        return tuple(self.num_in_front + math.prod(grid) for grid in self.grids)

    @property
    def segments(self) -> PackedSegments:
        """Which tokens attend to each other."""
        return PackedSegments(self.lengths, self.lengths)

    @property
    def text_segments(self) -> PackedSegments:
        """Which captions tokens attend to."""
        return PackedSegments(self.lengths, (self.num_text,) * len(self.grids), of_context=True)

    def rows(self, clips: Tensor) -> list[Tensor]:
        """Return what belongs to clips, [clips, ...], as [rows, ...] of each segment."""
        return [clips] if len(self.grids) == 1 else list(clips.unsqueeze(1))

    def modulation_index(
        self, known_first: Bool[Tensor, " clips"] | None, device: torch.device
    ) -> Int[Tensor, "rows tokens"] | None:
        """Return the row of the modulation that each token goes by; None if that is the row of its clip.

        Rows are those of the clips' times, then of time 0 for each clip if some first frame is known, then all of them
        again for tokens of text.
        """
        if len(self.grids) == 1 and not self.text_in_front and known_first is None:
            return None
        clips = torch.arange(self.num_clips, device=device)
        num_times = self.num_clips if known_first is None else 2 * self.num_clips
        of_first = clips if known_first is None else torch.where(known_first, self.num_clips + clips, clips)
        index = []
        for (frames, *area), text, first, rest in zip(
            self.grids, self.rows(num_times + clips), self.rows(of_first), self.rows(clips), strict=True
        ):
            area_size = math.prod(area)
            for rows, length in ((text, self.num_in_front), (first, area_size), (rest, (frames - 1) * area_size)):
                index.append(rows.unsqueeze(1).expand(-1, length))
        return torch.cat(index, dim=1)


def select_modulation(
    modulation: Float[Tensor, "rows parts width"], index: Int[Tensor, "batch tokens"] | None
) -> tuple[Float[Tensor, "batch #tokens width"], ...]:
    """Return the parts of a modulation, such as shift, scale and gate, of each token.

    Args:
        index: Row that each token goes by; None where each row of the batch has its own.
    """
    if index is None:
        return modulation.unsqueeze(1).unbind(2)
    # Its backward pass adds rows, where that of indexing by a tensor is serial on the CPU.
    return modulation.index_select(0, index.flatten()).unflatten(0, index.shape).unbind(2)


def timestep_embedding(times: Float[Tensor, " times"], num_features: int) -> Float[Tensor, "times num_features"]:
    """Return cosines of times at falling frequencies, then their sines."""
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
    """Return the layer normalisation without gain, times 1 + scale, plus shift (Peebles & Xie 2023, adaLN)."""
    return torch.addcmul(shift, layer_norm(hidden, hidden.shape[-1:], eps=EPSILON), 1 + scale)


class TimestepEmbedder(nn.Module):
    """Network over the timestep embedding, as in DiT.

    Args:
        num_features: Cosines and sines of a time.
    """

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.fc1 = nn.Linear(num_features, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, times: Float[Tensor, " times"]) -> Float[Tensor, "times width"]:
        """Return the features of times, of which 1 is noise and 0 data."""
        embedded = timestep_embedding(times, self.num_features).to(self.fc1.weight.dtype)
        return self.fc2(silu(self.fc1(embedded)))


class TextProjection(nn.Module):
    """Network from a text encoder's features to the width of the residual stream."""

    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(text_width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, text: Float[Tensor, "clips text text_width"]) -> Float[Tensor, "clips text width"]:
        """Return the projected features."""
        return self.fc2(gelu(self.fc1(text), approximate="tanh"))


def mean_of_words(text: Float[Tensor, "clips text text_width"]) -> Float[Tensor, "clips text_width"]:
    """Return the mean of each caption's features; a caption that is dropped has no words at all."""
    # Zeros stand behind a caption's end.
    num_words = (text != 0).any(dim=-1).sum(dim=1, keepdim=True).clamp(min=1)
    return text.sum(dim=1) / num_words


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
        """Attend to the context if there is one, else within the sequence.

        Args:
            rotation: Rotary embedding of queries and keys, applied before the one call of attention.
        """
        if context is None:
            query, key, value = self.query_key_value(hidden).chunk(3, dim=-1)
        else:
            query, (key, value) = self.query(hidden), self.key_value(context).chunk(2, dim=-1)
        # Norms stay in the gains' type, which autocast does not see to.
        query = self._heads(self.query_norm(query.to(self.query_norm.weight.dtype)))
        key = self._heads(self.key_norm(key.to(self.key_norm.weight.dtype)))
        if rotation is not None:
            query, key = apply_rotary_emb(query, rotation, pairing), apply_rotary_emb(key, rotation, pairing)
        attended = attend(query.to(value.dtype), key.to(value.dtype), self._heads(value), segments)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [batch, heads, tokens, head_dim]


class VideoBlock(nn.Module):
    """Attention among tokens, attention to the captions unless these are among them, and a GELU network.

    The first and last are modulated by time, and the second is not, as in Wan 2.1 (Wan Team 2025, section 4.2.1). One
    projection of the time serves all blocks, to which each adds an offset of its own.

    Args:
        num_kinds: Kinds of tokens, with an offset each: video, and text where it is among them.
    """

    def __init__(
        self, num_heads: int, head_dim: int, feed_forward_width: int, num_kinds: int, pairing: Pairing
    ) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.pairing: Pairing = pairing
        self.modulation = nn.Parameter(torch.zeros(num_kinds, 6, width))
        self.attention = VideoAttention(num_heads, head_dim, fused=True)
        self.text_norm = nn.LayerNorm(width, EPSILON) if num_kinds == 1 else None
        self.text_attention = VideoAttention(num_heads, head_dim, fused=False) if num_kinds == 1 else None
        self.fc1 = nn.Linear(width, feed_forward_width)
        self.fc2 = nn.Linear(feed_forward_width, width)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens width"],
        context: Float[Tensor, "batch text width"],
        modulation: Float[Tensor, "rows 6 width"],
        rotation: RotaryEmbedding,
        modulation_index: Int[Tensor, "batch tokens"] | None,
        segments: PackedSegments,
        text_segments: PackedSegments,
    ) -> Float[Tensor, "batch tokens width"]:
        """Return the tokens after all residual steps; arguments as of `VideoTrunk`."""
        offsets = (self.modulation.unsqueeze(1) + modulation).flatten(0, 1)  # [kinds * rows, 6, width]
        shift, scale, gate, last_shift, last_scale, last_gate = select_modulation(offsets, modulation_index)
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
        modulation: Float[Tensor, "rows 6 width"],
        cos: Float[Tensor, "#batch tokens half"],
        sin: Float[Tensor, "#batch tokens half"],
        modulation_index: Int[Tensor, "batch tokens"] | None,
        segments: PackedSegments,
        text_segments: PackedSegments,
    ) -> Float[Tensor, "batch tokens width"]:
        """Return the tokens after all blocks.

        Args:
            context: Projected captions.
            modulation: Shift, scale and gate, twice, of each time.
            cos: Cosines of the angles of each token's position; `sin` their sines.
            modulation_index: Row of the modulation that each token goes by, where those of the second kind of tokens
                follow those of the first; None where each row of the batch has its own.
            segments: Which tokens attend to each other, in the whole sequence.
            text_segments: Which captions the tokens attend to.
        """
        rotation = RotaryEmbedding(cos, sin).for_many(self.pairing)
        arguments = context, modulation, rotation, modulation_index, segments, text_segments
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, *arguments, use_reentrant=False)
            else:
                hidden = block(hidden, *arguments)
        return hidden


class FinalLayer(nn.Module):
    """Modulated normalisation and projection to the values of patches, as in DiT."""

    def __init__(self, width: int, patch_features: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.zeros(2, width))
        self.output = nn.Linear(width, patch_features)

    def forward(
        self,
        hidden: Float[Tensor, "batch tokens width"],
        times: Float[Tensor, "rows width"],
        modulation_index: Int[Tensor, "batch tokens"] | None,
        num_kinds: int,
    ) -> Float[Tensor, "batch tokens patch_features"]:
        """Return the values of all tokens; text among them is normalised like the rest, and to be left out.

        Args:
            times: Embedded times, to which `modulation` adds an offset of shift and scale.
            num_kinds: Kinds of tokens that `modulation_index` tells apart.
        """
        offsets = (self.modulation + times.unsqueeze(1)).repeat(num_kinds, 1, 1)  # [kinds * rows, 2, width]
        shift, scale = select_modulation(offsets, modulation_index)
        return self.output(modulated_norm(hidden, shift, scale))
