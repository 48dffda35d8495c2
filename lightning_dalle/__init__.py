"""PyTorch Lightning plugin suite for training generative image and video models.

Public names load on first use (PEP 562): importing the package alone pulls neither torch nor Lightning.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dalle.callbacks import (
        CLIPReranking as CLIPReranking,
        ContextParallelMonitor as ContextParallelMonitor,
        ImageGenerationMetrics as ImageGenerationMetrics,
        LossScaleMonitor as LossScaleMonitor,
        MotionCurve as MotionCurve,
        PowerSGDMonitor as PowerSGDMonitor,
        VideoSamples as VideoSamples,
    )
    from lightning_dalle.data.emoji.animated import AnimatedEmojiDataModule as AnimatedEmojiDataModule
    from lightning_dalle.data.emoji.openmoji import OpenMojiDataModule as OpenMojiDataModule
    from lightning_dalle.data.files.bucketing import TokenBuckets as TokenBuckets
    from lightning_dalle.data.files.images import CaptionedImagesDataModule as CaptionedImagesDataModule
    from lightning_dalle.data.files.videos import CaptionedVideosDataModule as CaptionedVideosDataModule
    from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule as MovingShapesDataModule
    from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule as CaptionedShapesDataModule
    from lightning_dalle.data.tokenizer import CaptionTokenizer as CaptionTokenizer
    from lightning_dalle.distributed.context_parallel.attention import ContextAttention as ContextAttention
    from lightning_dalle.distributed.context_parallel.comm import ContextGroups as ContextGroups
    from lightning_dalle.distributed.context_parallel.layout import SequenceLayout as SequenceLayout
    from lightning_dalle.distributed.context_parallel.plan import (
        ContextParallelConfig as ContextParallelConfig,
        SequencePlan as SequencePlan,
    )
    from lightning_dalle.distributed.context_parallel.session import ContextParallelSession as ContextParallelSession
    from lightning_dalle.distributed.powersgd.compressor import PowerSGD as PowerSGD
    from lightning_dalle.distributed.powersgd.config import PowerSGDConfig as PowerSGDConfig
    from lightning_dalle.lightning_modules.contrastive_module import (
        ContrastiveModule as ContrastiveModule,
        ContrastiveTrainingConfig as ContrastiveTrainingConfig,
    )
    from lightning_dalle.lightning_modules.discrete_vae_module import (
        DiscreteVAEModule as DiscreteVAEModule,
        DiscreteVAETrainingConfig as DiscreteVAETrainingConfig,
    )
    from lightning_dalle.lightning_modules.optimization import (
        OptimizerConfig as OptimizerConfig,
        ScheduleConfig as ScheduleConfig,
    )
    from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule as TextToImageModule
    from lightning_dalle.lightning_modules.text_to_image_training import (
        TextToImageTrainingConfig as TextToImageTrainingConfig,
    )
    from lightning_dalle.lightning_modules.video_autoencoder_module import (
        VideoAutoencoderModule as VideoAutoencoderModule,
        VideoAutoencoderTrainingConfig as VideoAutoencoderTrainingConfig,
    )
    from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule as VideoDiTModule
    from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTrainingConfig as VideoDiTTrainingConfig
    from lightning_dalle.models.contrastive import ContrastiveConfig as ContrastiveConfig
    from lightning_dalle.models.discrete_vae import DiscreteVAE as DiscreteVAE, DiscreteVAEConfig as DiscreteVAEConfig
    from lightning_dalle.models.openai_checkpoint import load_openai_discrete_vae as load_openai_discrete_vae
    from lightning_dalle.models.sparse_transformer import (
        SparseTransformer as SparseTransformer,
        SparseTransformerConfig as SparseTransformerConfig,
    )
    from lightning_dalle.models.text_encoders import (
        OpenClipTextEncoder as OpenClipTextEncoder,
        TextTowerConfig as TextTowerConfig,
    )
    from lightning_dalle.models.video_autoencoder import (
        CausalVideoAutoencoder as CausalVideoAutoencoder,
        CausalVideoAutoencoderConfig as CausalVideoAutoencoderConfig,
        PixelAutoencoder as PixelAutoencoder,
        VideoAutoencoder as VideoAutoencoder,
    )
    from lightning_dalle.models.video_dit import VideoDiT as VideoDiT, VideoDiTConfig as VideoDiTConfig
    from lightning_dalle.ops.attention.api import attend as attend
    from lightning_dalle.ops.attention.mask import SequenceMask as SequenceMask
    from lightning_dalle.ops.attention.packing import PackedSegments as PackedSegments
    from lightning_dalle.ops.attention.patterns import AttentionPattern as AttentionPattern
    from lightning_dalle.ops.rope import RotaryGridConfig as RotaryGridConfig
    from lightning_dalle.ops.schedules import CosineSchedule as CosineSchedule
    from lightning_dalle.ops.sharded_sequence import (
        local_positions as local_positions,
        sequence_mean as sequence_mean,
    )
    from lightning_dalle.optim import AdamW16 as AdamW16, Muon as Muon
    from lightning_dalle.plugins import PerBlockGradientScaling as PerBlockGradientScaling
    from lightning_dalle.strategies import (
        ContextParallelStrategy as ContextParallelStrategy,
        MeshStrategy as MeshStrategy,
        ShardedPowerSGDStrategy as ShardedPowerSGDStrategy,
        consolidate_checkpoint as consolidate_checkpoint,
    )

__version__ = "0.1.0"

_MODULE_OF = {
    "AdamW16": "lightning_dalle.optim",
    "AnimatedEmojiDataModule": "lightning_dalle.data.emoji.animated",
    "AttentionPattern": "lightning_dalle.ops.attention.patterns",
    "CLIPReranking": "lightning_dalle.callbacks",
    "CaptionTokenizer": "lightning_dalle.data.tokenizer",
    "CaptionedImagesDataModule": "lightning_dalle.data.files.images",
    "CaptionedShapesDataModule": "lightning_dalle.data.shapes.data_module",
    "CaptionedVideosDataModule": "lightning_dalle.data.files.videos",
    "CausalVideoAutoencoder": "lightning_dalle.models.video_autoencoder",
    "CausalVideoAutoencoderConfig": "lightning_dalle.models.video_autoencoder",
    "ContextAttention": "lightning_dalle.distributed.context_parallel.attention",
    "ContextGroups": "lightning_dalle.distributed.context_parallel.comm",
    "ContextParallelConfig": "lightning_dalle.distributed.context_parallel.plan",
    "ContextParallelMonitor": "lightning_dalle.callbacks",
    "ContextParallelSession": "lightning_dalle.distributed.context_parallel.session",
    "ContextParallelStrategy": "lightning_dalle.strategies",
    "ContrastiveConfig": "lightning_dalle.models.contrastive",
    "ContrastiveModule": "lightning_dalle.lightning_modules.contrastive_module",
    "ContrastiveTrainingConfig": "lightning_dalle.lightning_modules.contrastive_module",
    "CosineSchedule": "lightning_dalle.ops.schedules",
    "DiscreteVAE": "lightning_dalle.models.discrete_vae",
    "DiscreteVAEConfig": "lightning_dalle.models.discrete_vae",
    "DiscreteVAEModule": "lightning_dalle.lightning_modules.discrete_vae_module",
    "DiscreteVAETrainingConfig": "lightning_dalle.lightning_modules.discrete_vae_module",
    "ImageGenerationMetrics": "lightning_dalle.callbacks",
    "LossScaleMonitor": "lightning_dalle.callbacks",
    "MeshStrategy": "lightning_dalle.strategies",
    "MotionCurve": "lightning_dalle.callbacks",
    "MovingShapesDataModule": "lightning_dalle.data.moving_shapes.data_module",
    "Muon": "lightning_dalle.optim",
    "OpenClipTextEncoder": "lightning_dalle.models.text_encoders",
    "OpenMojiDataModule": "lightning_dalle.data.emoji.openmoji",
    "OptimizerConfig": "lightning_dalle.lightning_modules.optimization",
    "PackedSegments": "lightning_dalle.ops.attention.packing",
    "PerBlockGradientScaling": "lightning_dalle.plugins",
    "PixelAutoencoder": "lightning_dalle.models.video_autoencoder",
    "PowerSGD": "lightning_dalle.distributed.powersgd.compressor",
    "PowerSGDConfig": "lightning_dalle.distributed.powersgd.config",
    "PowerSGDMonitor": "lightning_dalle.callbacks",
    "RotaryGridConfig": "lightning_dalle.ops.rope",
    "ScheduleConfig": "lightning_dalle.lightning_modules.optimization",
    "SequenceLayout": "lightning_dalle.distributed.context_parallel.layout",
    "SequenceMask": "lightning_dalle.ops.attention.mask",
    "SequencePlan": "lightning_dalle.distributed.context_parallel.plan",
    "ShardedPowerSGDStrategy": "lightning_dalle.strategies",
    "SparseTransformer": "lightning_dalle.models.sparse_transformer",
    "SparseTransformerConfig": "lightning_dalle.models.sparse_transformer",
    "TextToImageModule": "lightning_dalle.lightning_modules.text_to_image_module",
    "TextToImageTrainingConfig": "lightning_dalle.lightning_modules.text_to_image_training",
    "TextTowerConfig": "lightning_dalle.models.text_encoders",
    "TokenBuckets": "lightning_dalle.data.files.bucketing",
    "VideoAutoencoder": "lightning_dalle.models.video_autoencoder",
    "VideoAutoencoderModule": "lightning_dalle.lightning_modules.video_autoencoder_module",
    "VideoAutoencoderTrainingConfig": "lightning_dalle.lightning_modules.video_autoencoder_module",
    "VideoDiT": "lightning_dalle.models.video_dit",
    "VideoDiTConfig": "lightning_dalle.models.video_dit",
    "VideoDiTModule": "lightning_dalle.lightning_modules.video_dit_module",
    "VideoDiTTrainingConfig": "lightning_dalle.lightning_modules.video_dit_training",
    "VideoSamples": "lightning_dalle.callbacks",
    "attend": "lightning_dalle.ops.attention.api",
    "consolidate_checkpoint": "lightning_dalle.strategies",
    "load_openai_discrete_vae": "lightning_dalle.models.openai_checkpoint",
    "local_positions": "lightning_dalle.ops.sharded_sequence",
    "sequence_mean": "lightning_dalle.ops.sharded_sequence",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_dalle' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
