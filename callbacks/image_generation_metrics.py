"""FID, KID and Inception Score of a model in training, against the images that it is validated on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_dalle.callbacks.generation import GenerationCallback
from lightning_dalle.evaluation.clip_features import as_frames, clip_extractor, clip_scores
from lightning_dalle.evaluation.extractors import load_extractor
from lightning_dalle.evaluation.features import FeatureCache, ImageFeatures, as_uint8
from lightning_dalle.evaluation.scores import image_scores


def gather_rows(trainer: Trainer, rows: Shaped[Tensor, "rows width"]) -> Shaped[Tensor, "all_rows width"]:
    """Return the rows of rank 0, then those of rank 1 and so on; all ranks must call it.

    Ranks may have different numbers of rows; one without any may bring [0, 0].
    """
    if trainer.world_size == 1:
        return rows
    shape = torch.tensor(rows.shape, device=rows.device)
    shapes = trainer.strategy.all_gather(shape)
    most_rows, width = shapes.max(dim=0).values.tolist()
    # Collectives take equal sizes only.
    padded = pad(rows, (0, width - rows.shape[1], 0, most_rows - rows.shape[0]))
    gathered = trainer.strategy.all_gather(padded)
    return torch.cat([part[:count] for part, count in zip(gathered, shapes[:, 0].tolist(), strict=True)])


class ImageGenerationMetrics(GenerationCallback):
    """Compares one generated image or clip per validation caption with the images or clips of those captions.

    Batches are mappings with an `image` or a `video` (uint8, or floating point in [0, 1]) and a `caption` (strings);
    the first dataloader counts. Each frame of a clip is an image. Logged under `val/` or `test/`: `fid`, `kid`,
    `inception_score` with the features of Inception; with others `fd_NAME`, `kd_NAME`, and `class_score_NAME` where
    they are a classifier's; and `num_scored_images`, without which none of them can be compared. For clips also
    `fd_video_NAME`, of features of whole clips, and `num_scored_clips`. What else they depend on (extractor, hash of
    its weights, resize, dtype) goes to the loggers' hyperparameters and is in `details`.

    The extractor lives in the callback only, frozen and in fp32. Features of the validation images are kept on disk,
    found by content, extractor and resize.

    Args:
        features: `"inception"`, `"effnet_lite0"`, the path of a local Inception weights file, or a network from uint8
            images to features, which is copied.
        num_images: Images or clips of each kind, all ranks together; fewer if the validation set has fewer.
        every_n_validations: Turns, see `GenerationCallback`.
        max_batch: Images or clips that are generated and looked at together.
        generate_options: Passed on to `generate`.
        cache_folder: Cache folder of the features; None is `feature_cache` in the Trainer's `default_root_dir`.
        seed: Seeds the generated images and of the kernel distance's subsets.
        video_features: Video features of whole clips: a network from uint8 clips [clips, 3, frames, height, width] to
            features, which is copied. None takes the means over time of the frames' features and of their changes from
            frame to frame.

    Attributes:
        scores: Scores of the last turn, by name.
        details: Details of the extractor.

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
        video_features: nn.Module | None = None,
    ) -> None:
        super().__init__(every_n_validations, generate_options, seed)
        if num_images < 2:
            raise ValueError(f"num_images ({num_images}) must be at least 2: one image has no covariance")
        if max_batch < 1:
            raise ValueError(f"max_batch ({max_batch}) must be at least 1")
        self.extractor = load_extractor(features)
        self.details = self.extractor.details
        self.video_extractor = clip_extractor(self.extractor, video_features)
        self.num_images = num_images
        self.max_batch = max_batch
        self.cache_folder = cache_folder
        self.scores: dict[str, float] = {}
        self._captions: list[str] = []
        self._real: list[Tensor] = []
        self._real_clips: list[Tensor] = []
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
        if self._should_run and dataloader_idx == 0:
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
        if self._should_run:
            self._score(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and score."""
        self._score(trainer, pl_module, "test")

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._should_run:
            return
        self._captions, self._real, self._real_clips = [], [], []
        with torch.inference_mode(False):
            self.extractor.to(pl_module.device)
            self.video_extractor.to(pl_module.device)
        root = Path(self.cache_folder or Path(trainer.default_root_dir) / "feature_cache")
        key = "-".join(
            (self.extractor.name, self.details["weights_sha256"][:16], self.extractor.resize.replace(" ", "_"))
        )
        self._cache = FeatureCache(root / key / f"rank_{trainer.global_rank}_of_{trainer.world_size}.pt")

    def _collect(self, trainer: Trainer, batch: Any) -> None:
        if not isinstance(batch, Mapping) or "caption" not in batch or not {"image", "video"} & set(batch):
            raise TypeError(
                "ImageGenerationMetrics needs batches with 'image' or 'video' and 'caption' and got a "
                f"{type(batch).__name__} without; return a mapping with both from the dataset"
            )
        share = -(-self.num_images // trainer.world_size)
        missing = share - len(self._captions)
        if missing <= 0 or not batch["caption"]:
            return
        images = as_uint8(batch["video" if "video" in batch else "image"][:missing])
        self._captions += batch["caption"][:missing]
        frames = self._cache.features(as_frames(images), lambda unknown: self.extractor.extract(unknown).features)
        self._real.append(frames)
        if images.ndim == 5:
            self._real_clips.append(self.video_extractor.extract(images, frames).cpu())

    def _score(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._cache.save()
        with self._sampling(trainer, pl_module):
            generated, generated_clips = self._generate_features(trainer, pl_module)
            generated = ImageFeatures(*(self._gather(trainer, part) for part in generated))
            real, real_clips, generated_clips = (
                self._gather(trainer, rows.to(pl_module.device))
                for rows in (_concatenated(self._real), _concatenated(self._real_clips), generated_clips)
            )
        try:
            scores = image_scores(ImageFeatures(real, real[:, :0]), generated, self.extractor.name, self.seed)
            scores |= clip_scores(real_clips, generated_clips, self.video_extractor.name)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {trainer.global_step}: {error}") from error
        self.scores = {**scores, "num_scored_images": float(len(real))}
        pl_module.log_dict({f"{stage}/{name}": value for name, value in self.scores.items()}, sync_dist=True)
        self._log_details(trainer)
        trainer.strategy.barrier(type(self).__name__)

    def _gather(self, trainer: Trainer, rows: Tensor) -> Tensor:
        """Rows of all ranks on the CPU, less those of captions beyond `num_images`."""
        rows_per_caption = len(rows) // max(1, len(self._captions))
        gathered = gather_rows(trainer, rows)
        most = gather_rows(trainer, torch.tensor([[rows_per_caption]], device=rows.device)).max()
        return gathered[: self.num_images * int(most)].cpu()

    def _log_details(self, trainer: Trainer) -> None:
        if not self._details_logged:
            for logger in trainer.loggers:
                logger.log_hyperparams({"image_generation_metrics": self.details})
        self._details_logged = True

    def _generate_features(self, trainer: Trainer, pl_module: LightningModule) -> tuple[ImageFeatures, Tensor]:
        """Return the features of the frames and of the clips, of one image or clip per caption of this rank."""
        counts = gather_rows(trainer, torch.tensor([[len(self._captions)]], device=pl_module.device))
        share = int(counts.max())
        # All ranks call generate equally often, as a sharded model needs; what was drawn too much is dropped.
        captions = self._captions + (self._captions[-1:] or [""]) * (share - len(self._captions))
        chunks, clips = [], []
        for start in range(0, share, self.max_batch):
            chunk = captions[start : start + self.max_batch]
            images = self._generate(trainer, pl_module, chunk, 1, key=(trainer.global_rank, start))[:, 0]
            images = images[: max(0, len(self._captions) - start)]
            chunks.append(self.extractor.extract(as_frames(images)))
            if images.ndim == 5:
                clips.append(self.video_extractor.extract(images, chunks[-1].features))
        return ImageFeatures(*(_concatenated(parts) for parts in zip(*chunks, strict=True))), _concatenated(clips)


def _concatenated(chunks: Sequence[Tensor]) -> Tensor:
    """Return all rows that there are; an empty chunk does not know how wide it would be."""
    filled = [chunk for chunk in chunks if len(chunk)]
    return torch.cat(filled) if filled else torch.empty(0, 0, device=chunks[0].device if chunks else None)
