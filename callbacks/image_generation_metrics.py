"""FID, KID and Inception Score of a model in training, against the images that it is validated on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_dalle.callbacks.generation_callback import GenerationCallback
from lightning_dalle.callbacks.rank_gathering import gather_rows
from lightning_dalle.evaluation.extractors import load_extractor
from lightning_dalle.evaluation.feature_cache import FeatureCache
from lightning_dalle.evaluation.feature_extractor import ImageFeatures
from lightning_dalle.evaluation.image_scores import image_scores
from lightning_dalle.evaluation.pixels import as_uint8


class ImageGenerationMetrics(GenerationCallback):
    """Compares one generated image per validation caption with the images of those captions.

    Batches are mappings with an `image` (uint8, or floating point in [0, 1]) and a `caption` (strings); the first
    dataloader counts. Logged under `val/` or `test/`: `fid`, `kid`, `inception_score` with the features of Inception;
    with others `fd_NAME`, `kd_NAME`, and `class_score_NAME` where they are a classifier's; and `num_scored_images`,
    without which none of them can be compared. What else they depend on (extractor, hash of its weights, resize, dtype)
    goes to the loggers' hyperparameters and is in `details`.

    The extractor lives in the callback only, frozen and in fp32. Features of the validation images are kept on disk,
    found by content, extractor and resize.

    Args:
        features: `"inception"`, `"effnet_lite0"`, the path of a local Inception weights file, or a network from uint8
            images to features, which is copied.
        num_images: Images of each kind, all ranks together; fewer if the validation set has fewer.
        every_n_validations: Turns, see `GenerationCallback`.
        max_batch: Images that are generated and looked at together.
        generate_options: Passed on to `generate`.
        cache_folder: Of the features; None is `feature_cache` in the Trainer's `default_root_dir`.
        seed: Of the generated images and of the kernel distance's subsets.

    Attributes:
        scores: Of the last turn, by name.
        details: Of the extractor.

    Raises:
        ValueError: If `num_images` is below 2 or `max_batch` below 1.
    """

    _cache: FeatureCache

    def __init__(
        self,
        features: str | Path | nn.Module = "inception",
        num_images: int = 1000,
        every_n_validations: int = 1,
        max_batch: int = 64,
        generate_options: Mapping[str, Any] | None = None,
        cache_folder: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(every_n_validations, generate_options, seed)
        if num_images < 2:
            raise ValueError(f"num_images ({num_images}) must be at least 2: one image has no covariance")
        if max_batch < 1:
            raise ValueError(f"max_batch ({max_batch}) must be at least 1")
        self.extractor = load_extractor(features)
        self.details = self.extractor.details
        self.num_images = num_images
        self.max_batch = max_batch
        self.cache_folder = cache_folder
        self.scores: dict[str, float] = {}
        self._captions: list[str] = []
        self._real: list[Tensor] = []
        self._details_logged = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect, if it is time."""
        super().on_validation_start(trainer, pl_module)
        self._begin(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect."""
        super().on_test_start(trainer, pl_module)
        self._begin(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect captions and features of their images."""
        if self._is_turn and dataloader_idx == 0:
            self._collect(trainer, batch)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect captions and features of their images."""
        if dataloader_idx == 0:
            self._collect(trainer, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and score, if it is time."""
        if self._is_turn:
            self._score(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and score."""
        self._score(trainer, pl_module, "test")

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_turn:
            return
        self._captions, self._real = [], []
        with torch.inference_mode(False):
            self.extractor.to(pl_module.device)
        root = Path(self.cache_folder or Path(trainer.default_root_dir) / "feature_cache")
        key = "-".join(
            (self.extractor.name, self.details["weights_sha256"][:16], self.extractor.resize.replace(" ", "_"))
        )
        self._cache = FeatureCache(root / key / f"rank_{trainer.global_rank}_of_{trainer.world_size}.pt")

    def _collect(self, trainer: Trainer, batch: Any) -> None:
        if not isinstance(batch, Mapping) or not {"image", "caption"} <= set(batch):
            raise TypeError(
                f"ImageGenerationMetrics needs batches with 'image' and 'caption' and got a {type(batch).__name__} "
                "without; return a mapping with both from the dataset"
            )
        share = -(-self.num_images // trainer.world_size)
        missing = share - len(self._captions)
        if missing <= 0 or not batch["caption"]:
            return
        images = as_uint8(batch["image"][:missing])
        self._captions += batch["caption"][:missing]
        self._real.append(self._cache.features(images, lambda unknown: self.extractor.extract(unknown).features))

    def _score(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._cache.save()
        with self._sampling(trainer, pl_module):
            generated = self._generate_features(trainer, pl_module)
            local = torch.cat(self._real) if self._real else torch.empty(0, 0)
            real = gather_rows(trainer, local.to(pl_module.device))[: self.num_images].cpu()
            generated = ImageFeatures(*(gather_rows(trainer, part)[: self.num_images].cpu() for part in generated))
        try:
            scores = image_scores(ImageFeatures(real, real[:, :0]), generated, self.extractor.name, self.seed)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {trainer.global_step}: {error}") from error
        self.scores = {**scores, "num_scored_images": float(len(real))}
        pl_module.log_dict({f"{stage}/{name}": value for name, value in self.scores.items()}, sync_dist=True)
        self._log_details(trainer)
        trainer.strategy.barrier(type(self).__name__)

    def _log_details(self, trainer: Trainer) -> None:
        if not self._details_logged:
            for logger in trainer.loggers:
                logger.log_hyperparams({"image_generation_metrics": self.details})
        self._details_logged = True

    def _generate_features(self, trainer: Trainer, pl_module: LightningModule) -> ImageFeatures:
        """Features of one image per caption of this rank."""
        counts = gather_rows(trainer, torch.tensor([[len(self._captions)]], device=pl_module.device))
        share = int(counts.max())
        # All ranks call generate equally often, as a sharded model needs; what was drawn too much is dropped.
        captions = self._captions + (self._captions[-1:] or [""]) * (share - len(self._captions))
        chunks = []
        for start in range(0, share, self.max_batch):
            chunk = captions[start : start + self.max_batch]
            images = self._generate(trainer, pl_module, chunk, 1, key=(trainer.global_rank, start))
            chunks.append(self.extractor.extract(images[:, 0]))
        return ImageFeatures(*(torch.cat(parts)[: len(self._captions)] for parts in zip(*chunks, strict=True)))
