"""Callbacks of the suite; imported as `lightning_dalle.callbacks`."""

from lightning_dalle.callbacks.clip_reranking import CLIPReranking, RerankingResult
from lightning_dalle.callbacks.context_parallel_monitor import ContextParallelMonitor
from lightning_dalle.callbacks.image_generation_metrics import ImageGenerationMetrics
from lightning_dalle.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_dalle.callbacks.motion_curve import MotionCurve
from lightning_dalle.callbacks.powersgd_monitor import PowerSGDMonitor
from lightning_dalle.callbacks.video_samples import VideoSamples

__all__ = [
    "CLIPReranking",
    "ContextParallelMonitor",
    "ImageGenerationMetrics",
    "LossScaleMonitor",
    "MotionCurve",
    "PowerSGDMonitor",
    "RerankingResult",
    "VideoSamples",
]
