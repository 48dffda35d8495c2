"""Callbacks of the suite; imported as `lightning_dalle.callbacks`."""

from lightning_dalle.callbacks.clip_reranking import CLIPReranking, RerankingResult
from lightning_dalle.callbacks.image_generation_metrics import ImageGenerationMetrics

__all__ = ["CLIPReranking", "ImageGenerationMetrics", "RerankingResult"]
