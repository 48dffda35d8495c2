"""A diffusion transformer over the tokens of captioned clips (Peebles & Xie 2023; Wan Team 2025, section 4.2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_dalle.models.modes import draw_normal_weights
from lightning_dalle.models.video_blocks import (
    ClipLayout,
    FinalLayer,
    TextProjection,
    TimestepEmbedder,
    VideoBlock,
    VideoTrunk,
    mean_of_words,
)
from lightning_dalle.ops.flow_matching import LEAST_TIME, velocity_towards
from lightning_dalle.ops.patchify import Grid, patchify, token_grid, unpatchify
from lightning_dalle.ops.rope import (
    Policies,
    RotaryEmbedding,
    RotaryGridConfig,
    grid_rotation,
    position_features,
    resolve_policies,
)
from lightning_dalle.ops.rope_scaling import Default

TextConditioning = Literal["cross_attention", "joint"]
Prediction = Literal["velocity", "clean"]


@dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Sizes of a `VideoDiT`; the defaults are those of Wan 2.1's smaller network, 1.4e9 parameters.

    That network's positions are `RotaryGridConfig(original_max_position_embeddings=(21, 30, 52),
    axis_dims=(44, 42, 42))`: 81 frames of 480 x 832 pixels, 4 x 8 x 8 of which make a latent.

    Args:
        patch_size: Values of the grid along time, height and width that make a token.
        text_width: Features of each token that the text encoder gives.
        conditioning: `cross_attention` from video to text; `joint` attention of both in one sequence.
        prediction: What the last layer gives: the `velocity`, or the `clean` data that it leads to, which suit patches
            of more values than the width, through which noise does not fit (Li & He 2025).
        data_mean: Where the outputs start, so that training need not find it first.
        time_features: Sines and cosines of the time.
        pooled_text: The mean of the words' features modulates blocks together with the time (Esser et al. 2024, section
            5), which small networks learn to follow much sooner than single words.
        position_features: Fourier position features that are added to the tokens (`ops.position_features`), so that
            each knows where it stands: rotations tell how far apart two tokens are. 0 has none.
        rotary: Positions; its `original_max_position_embeddings` counts tokens.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its activations.

    Raises:
        ValueError: If a size is below 1, or does not divide as the network needs.
    """

    depth: int = 30
    num_heads: int = 12
    head_dim: int = 128
    feed_forward_width: int = 8960
    channels: int = 16
    patch_size: Grid = (1, 2, 2)
    text_width: int = 4096
    conditioning: TextConditioning = "cross_attention"
    prediction: Prediction = "velocity"
    data_mean: float = 0.0
    time_features: int = 256
    pooled_text: bool = False
    position_features: int = 0
    rotary: RotaryGridConfig
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        sizes = {name: value for name, value in vars(self).items() if type(value) is int}
        for name, size in {**sizes, "patch_size": min(self.patch_size)}.items():
            least = 0 if name == "position_features" else 1
            if size < least:
                raise ValueError(f"{name} ({size}) must be at least {least}")
        if len(self.patch_size) != 3:
            raise ValueError(f"patch_size {self.patch_size} must have three sides: time, height and width")
        if self.time_features % 2:
            raise ValueError(f"time_features ({self.time_features}) must be even: sines and cosines")
        for name, choices in (("conditioning", TextConditioning), ("prediction", Prediction)):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise ValueError(f"{name} ({value!r}) must be {known[0]!r} or {known[1]!r}")
        self.rotary.split(self.head_dim)

    @property
    def width(self) -> int:
        """Features of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def patch_features(self) -> int:
        """Values of a token."""
        return self.channels * math.prod(self.patch_size)


class VideoDiT(nn.Module):
    """Velocities of clips on their way from noise to data, given time and caption.

    A batch of clips of one size, or a sequence of clips of any sizes: these are packed into one sequence, with
    positions of their own, and attend to themselves and their caption alone. Before training blocks are the identity
    (adaLN-zero).

    Example:
        >>> from lightning_dalle.ops.rope import RotaryGridConfig
        >>> rotary = RotaryGridConfig(original_max_position_embeddings=(4, 4, 4))
        >>> config = VideoDiTConfig(depth=2, num_heads=2, head_dim=16, feed_forward_width=64, channels=3,
        ...                         text_width=8, rotary=rotary)
        >>> network = VideoDiT(config)
        >>> network(torch.zeros(2, 3, 4, 8, 8), torch.rand(2), torch.zeros(2, 5, 8)).shape
        torch.Size([2, 3, 4, 8, 8])
        >>> packed = network([torch.zeros(3, 4, 8, 8), torch.zeros(3, 1, 4, 2)], torch.rand(2), torch.zeros(2, 5, 8))
        >>> [tuple(clip.shape) for clip in packed]
        [(3, 4, 8, 8), (3, 1, 4, 2)]
    """

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_embedding = nn.Linear(config.patch_features, width)
        self.text_projection = TextProjection(config.text_width, width)
        self.timestep_embedder = TimestepEmbedder(config.time_features, width)
        self.time_modulation = nn.Linear(width, 6 * width)
        self.text_pooling = nn.Linear(config.text_width, width) if config.pooled_text else None
        self.position_embedding = None
        if config.position_features:
            self.position_embedding = nn.Linear(2 * config.position_features, width, bias=False)
        self.num_kinds = 2 if config.conditioning == "joint" else 1
        sizes = config.num_heads, config.head_dim, config.feed_forward_width
        blocks = (VideoBlock(*sizes, self.num_kinds, config.rotary.pairing) for _ in range(config.depth))
        self.trunk = VideoTrunk(blocks, config.rotary.pairing, config.activation_checkpointing)
        self.final_layer = FinalLayer(width, config.patch_features)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw N(0, 0.02) weights; biases (the last is of the data's mean), and what modulates or ends, become 0."""
        draw_normal_weights(self)
        for module in self.modules():
            if isinstance(module, VideoBlock):
                nn.init.zeros_(module.modulation)
                if module.text_attention is not None:
                    nn.init.zeros_(module.text_attention.output.weight)
        for parameter in (self.time_modulation.weight, self.final_layer.output.weight, self.final_layer.modulation):
            nn.init.zeros_(parameter)
        if self.text_pooling is not None:
            # Larger than the rest: with weak captions motion was not learned at all.
            nn.init.normal_(self.text_pooling.weight, std=self.config.text_width**-0.5)
        if self.position_embedding is not None:
            # As large as the embedded noise, beside which positions would else be found late.
            spread = 0.02 * (self.config.patch_features / self.config.position_features) ** 0.5
            nn.init.normal_(self.position_embedding.weight, std=spread)
        mean = self.config.data_mean
        nn.init.constant_(self.final_layer.output.bias, mean if self.config.prediction == "clean" else -mean)

    def forward(
        self,
        clips: Float[Tensor, "clips channels frames height width"]
        | Sequence[Float[Tensor, "channels _frames _height _width"]],
        times: Float[Tensor, " clips"],
        text: Float[Tensor, "clips text text_width"],
        *,
        known_first: Bool[Tensor, " clips"] | None = None,
        policies: Policies | None = None,
        least_time: float = LEAST_TIME,
    ) -> Tensor | list[Tensor]:
        """Return velocities in the shapes of the clips.

        Args:
            times: 1 is noise, 0 data.
            text: Features of captions; zeros are no caption.
            known_first: Clips whose first frame of tokens is data already, whatever their time.
            policies: Positions along time, height and width, instead of the configuration's.
            least_time: What times are at least taken for where clean data are predicted; see `velocity_towards`.

        Raises:
            ValueError: If a clip does not fit the patches, or is larger than in training and no policy was chosen; or
                if there are more of one argument than of another.
        """
        if not len(clips) == len(times) == len(text):
            raise ValueError(f"clips ({len(clips)}), times ({len(times)}) and text ({len(text)}) must be equally many")
        # 1. One form of a batch and of clips of any sizes: segments of rows, each [rows, channels, t, h, w].
        segments = [clips] if isinstance(clips, Tensor) else [clip.unsqueeze(0) for clip in clips]
        layout = ClipLayout(
            tuple(self.token_grid(segment.shape[2:], policies) for segment in segments),
            num_clips=len(times),
            num_text=text.shape[1],
            text_in_front=self.config.conditioning == "joint",
        )
        index = layout.modulation_index(known_first, text.device)
        # 2. Conditions: times, with one more for what is known, and captions, as a whole and as words.
        embedded = self._embed_times(times, text, known_first)  # [rows of the modulation, width]
        modulation = self.time_modulation(silu(embedded)).unflatten(-1, (6, -1))
        captions = layout.rows(self.text_projection(text))  # of each segment [rows, text, width]
        # 3. Tokens of patches that know where they are, of each segment [rows, tokens, width].
        tokens = self._embed_patches(segments, layout, policies)
        if layout.text_in_front:
            tokens = [torch.cat(pair, dim=1) for pair in zip(captions, tokens, strict=True)]
        rotation = self._rotation(layout, policies, text)
        # 4. Blocks, on all tokens of a row at once.
        hidden = self.trunk(
            # The identity path is as wide as the weights, whatever autocast says.
            torch.cat(tokens, dim=1).to(self.patch_embedding.weight.dtype),
            torch.cat(captions, dim=1),
            modulation,
            rotation.cos,
            rotation.sin,
            index,
            layout.segments,
            layout.text_segments,
        )
        # 5. Patches again, without the text, as velocities.
        values = self.final_layer(hidden, embedded, index, self.num_kinds).split(layout.lengths, dim=1)
        outputs = [
            unpatchify(part[:, layout.num_in_front :], grid, self.config.patch_size)
            for part, grid in zip(values, layout.grids, strict=True)
        ]
        if self.config.prediction == "clean":
            towards = partial(velocity_towards, least_time=least_time)
            outputs = list(map(towards, segments, outputs, layout.rows(times)))
        return outputs[0] if isinstance(clips, Tensor) else [output.squeeze(0) for output in outputs]

    def _embed_times(
        self, times: Float[Tensor, " clips"], text: Float[Tensor, "clips text text_width"], known_first: Tensor | None
    ) -> Float[Tensor, "rows width"]:
        """Return the features of the clips' times, and then of time 0 for each if some first frame is known."""
        embedded = self.timestep_embedder(times if known_first is None else torch.cat([times, torch.zeros_like(times)]))
        if self.text_pooling is None:
            return embedded
        pooled = self.text_pooling(mean_of_words(text))
        return embedded + (pooled if known_first is None else pooled.repeat(2, 1))

    def _embed_patches(
        self, segments: Sequence[Float[Tensor, "rows channels _t _h _w"]], layout: ClipLayout, policies: Policies | None
    ) -> list[Float[Tensor, "rows _tokens width"]]:
        """Return the tokens of each segment."""
        tokens = [self.patch_embedding(patchify(segment, self.config.patch_size)) for segment in segments]
        if self.position_embedding is None:
            return tokens
        positions = map(self.position_embedding, self._position_features(layout.grids, policies, tokens[0]))
        return list(map(torch.add, tokens, positions))

    def token_grid(self, size: Sequence[int], policies: Policies | None = None) -> Grid:
        """Return the tokens of a clip along time, height and width.

        Raises:
            ValueError: If the clip does not fit the patches, or is larger than in training and no policy was chosen.
        """
        grid = token_grid((size[0], size[1], size[2]), self.config.patch_size)
        rotary = self.config.rotary
        for axis, now, trained, policy in zip(
            ("time", "height", "width"), grid, rotary.original_max_position_embeddings, rotary.policies, strict=True
        ):
            if policies is None and now > trained and isinstance(policy, Default):
                raise ValueError(
                    f"{axis} has {now} tokens, more than the {trained} of original_max_position_embeddings; "
                    "choose policies for time, height and width, such as ('riflex', 'ntk_aware', 'ntk_aware'), "
                    "or 'default' for positions as they are"
                )
        return grid

    @torch.compiler.disable
    def _rotation(self, layout: ClipLayout, policies: Policies | None, like: Tensor) -> RotaryEmbedding:
        """Return the rotary embedding of a row, in at least 32 bits; a compiler would make its tables anew."""
        chosen = None if policies is None else resolve_policies(policies)
        dtype = torch.promote_types(like.dtype, torch.float32)
        rotary, head_dim = self.config.rotary, self.config.head_dim
        tables = [
            grid_rotation(rotary, head_dim, grid, chosen, layout.num_in_front, dtype, like.device)
            for grid in layout.grids
        ]
        return RotaryEmbedding(
            torch.cat([table.cos for table in tables], dim=1), torch.cat([table.sin for table in tables], dim=1)
        )

    @torch.compiler.disable
    def _position_features(self, grids: Sequence[Grid], policies: Policies | None, like: Tensor) -> list[Tensor]:
        """Return the Fourier position features of the tokens of each segment."""
        rotary, head_dim = self.config.rotary, self.config.head_dim
        chosen = resolve_policies(rotary.policies if policies is None else policies)
        dtype = self.patch_embedding.weight.dtype
        count = self.config.position_features
        return [position_features(rotary, head_dim, grid, chosen, count, dtype, like.device) for grid in grids]
