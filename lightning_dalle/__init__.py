"""PyTorch Lightning plugin suite for training generative image and video models.

Public names load on first use (PEP 562): importing the package alone pulls neither torch nor Lightning.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dalle.callbacks import (
        CLIPReranking as CLIPReranking,
        ImageGenerationMetrics as ImageGenerationMetrics,
        LossScaleMonitor as LossScaleMonitor,
        VideoSamples as VideoSamples,
    )
    from lightning_dalle.data.animated_emoji import AnimatedEmoji as AnimatedEmoji
    from lightning_dalle.data.captioned_images import CaptionedImages as CaptionedImages
    from lightning_dalle.data.captioned_shapes import CaptionedShapes as CaptionedShapes
    from lightning_dalle.data.captioned_videos import CaptionedVideos as CaptionedVideos
    from lightning_dalle.data.moving_shapes import MovingShapes as MovingShapes
    from lightning_dalle.data.open_moji import OpenMoji as OpenMoji
    from lightning_dalle.data.token_buckets import TokenBuckets as TokenBuckets
    from lightning_dalle.data.tokenizer import CaptionTokenizer as CaptionTokenizer
    from lightning_dalle.distributed.context_attention import ContextAttention as ContextAttention
    from lightning_dalle.distributed.context_groups import ContextGroups as ContextGroups
    from lightning_dalle.distributed.cut_sequences import CutSequences as CutSequences
    from lightning_dalle.distributed.powersgd import PowerSGD as PowerSGD
    from lightning_dalle.distributed.powersgd_config import PowerSGDConfig as PowerSGDConfig
    from lightning_dalle.distributed.sequence_layout import SequenceLayout as SequenceLayout
    from lightning_dalle.distributed.sequence_mask import SequenceMask as SequenceMask
    from lightning_dalle.distributed.sequence_plan import SequencePlan as SequencePlan
    from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule as ContrastiveModule
    from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule as DiscreteVAEModule
    from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule as TextToImageModule
    from lightning_dalle.lightning_modules.video_autoencoder_module import (
        VideoAutoencoderModule as VideoAutoencoderModule,
    )
    from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule as VideoDiTModule
    from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTraining as VideoDiTTraining
    from lightning_dalle.models.contrastive import ContrastiveConfig as ContrastiveConfig
    from lightning_dalle.models.discrete_vae import DiscreteVAE as DiscreteVAE, DiscreteVAEConfig as DiscreteVAEConfig
    from lightning_dalle.models.open_clip_text_encoder import OpenClipTextEncoder as OpenClipTextEncoder
    from lightning_dalle.models.openai_checkpoint import load_openai as load_openai
    from lightning_dalle.models.sparse_transformer import (
        SparseTransformer as SparseTransformer,
        SparseTransformerConfig as SparseTransformerConfig,
    )
    from lightning_dalle.models.text_tower import TextTowerConfig as TextTowerConfig
    from lightning_dalle.models.video_autoencoder import (
        CausalVideoAutoencoder as CausalVideoAutoencoder,
        CausalVideoAutoencoderConfig as CausalVideoAutoencoderConfig,
    )
    from lightning_dalle.models.video_autoencoder_protocol import (
        PixelAutoencoder as PixelAutoencoder,
        VideoAutoencoder as VideoAutoencoder,
    )
    from lightning_dalle.models.video_dit import VideoDiT as VideoDiT
    from lightning_dalle.models.video_dit_config import VideoDiTConfig as VideoDiTConfig
    from lightning_dalle.ops.attention_pattern import AttentionPattern as AttentionPattern
    from lightning_dalle.ops.rotary_grid import RotaryGridConfig as RotaryGridConfig
    from lightning_dalle.ops.sequence_cut import (
        own_positions as own_positions,
        sequence_mean as sequence_mean,
    )
    from lightning_dalle.optim import AdamW16 as AdamW16, Muon as Muon
    from lightning_dalle.plugins import PerBlockGradientScaling as PerBlockGradientScaling
    from lightning_dalle.strategies import (
        ContextParallelStrategy as ContextParallelStrategy,
        ShardedPowerSGDStrategy as ShardedPowerSGDStrategy,
        export_checkpoint as export_checkpoint,
    )

__version__ = "0.1.0"

_MODULE_OF = {
    "AdamW16": "lightning_dalle.optim",
    "AnimatedEmoji": "lightning_dalle.data.animated_emoji",
    "AttentionPattern": "lightning_dalle.ops.attention_pattern",
    "CLIPReranking": "lightning_dalle.callbacks",
    "CaptionTokenizer": "lightning_dalle.data.tokenizer",
    "CaptionedImages": "lightning_dalle.data.captioned_images",
    "CaptionedShapes": "lightning_dalle.data.captioned_shapes",
    "CaptionedVideos": "lightning_dalle.data.captioned_videos",
    "CausalVideoAutoencoder": "lightning_dalle.models.video_autoencoder",
    "CausalVideoAutoencoderConfig": "lightning_dalle.models.video_autoencoder",
    "ContextAttention": "lightning_dalle.distributed.context_attention",
    "ContextGroups": "lightning_dalle.distributed.context_groups",
    "ContextParallelStrategy": "lightning_dalle.strategies",
    "ContrastiveConfig": "lightning_dalle.models.contrastive",
    "ContrastiveModule": "lightning_dalle.lightning_modules.contrastive_module",
    "CutSequences": "lightning_dalle.distributed.cut_sequences",
    "DiscreteVAE": "lightning_dalle.models.discrete_vae",
    "DiscreteVAEConfig": "lightning_dalle.models.discrete_vae",
    "DiscreteVAEModule": "lightning_dalle.lightning_modules.discrete_vae_module",
    "ImageGenerationMetrics": "lightning_dalle.callbacks",
    "LossScaleMonitor": "lightning_dalle.callbacks",
    "MovingShapes": "lightning_dalle.data.moving_shapes",
    "Muon": "lightning_dalle.optim",
    "OpenClipTextEncoder": "lightning_dalle.models.open_clip_text_encoder",
    "OpenMoji": "lightning_dalle.data.open_moji",
    "PerBlockGradientScaling": "lightning_dalle.plugins",
    "PixelAutoencoder": "lightning_dalle.models.video_autoencoder_protocol",
    "PowerSGD": "lightning_dalle.distributed.powersgd",
    "PowerSGDConfig": "lightning_dalle.distributed.powersgd_config",
    "RotaryGridConfig": "lightning_dalle.ops.rotary_grid",
    "SequenceLayout": "lightning_dalle.distributed.sequence_layout",
    "SequenceMask": "lightning_dalle.distributed.sequence_mask",
    "SequencePlan": "lightning_dalle.distributed.sequence_plan",
    "ShardedPowerSGDStrategy": "lightning_dalle.strategies",
    "SparseTransformer": "lightning_dalle.models.sparse_transformer",
    "SparseTransformerConfig": "lightning_dalle.models.sparse_transformer",
    "TextToImageModule": "lightning_dalle.lightning_modules.text_to_image_module",
    "TextTowerConfig": "lightning_dalle.models.text_tower",
    "TokenBuckets": "lightning_dalle.data.token_buckets",
    "VideoAutoencoder": "lightning_dalle.models.video_autoencoder_protocol",
    "VideoAutoencoderModule": "lightning_dalle.lightning_modules.video_autoencoder_module",
    "VideoDiT": "lightning_dalle.models.video_dit",
    "VideoDiTConfig": "lightning_dalle.models.video_dit_config",
    "VideoDiTModule": "lightning_dalle.lightning_modules.video_dit_module",
    "VideoDiTTraining": "lightning_dalle.lightning_modules.video_dit_training",
    "VideoSamples": "lightning_dalle.callbacks",
    "export_checkpoint": "lightning_dalle.strategies",
    "load_openai": "lightning_dalle.models.openai_checkpoint",
    "own_positions": "lightning_dalle.ops.sequence_cut",
    "sequence_mean": "lightning_dalle.ops.sequence_cut",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_dalle' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
