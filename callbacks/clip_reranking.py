"""Best-of-N sampling: many candidates of a caption, ranked by an image-text model (Ramesh et al. 2021, section 2.6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchvision.utils import make_grid

from lightning_dalle.callbacks.generation import CaptionsCallback
from lightning_dalle.callbacks.protocols import ImageTextScorer
from lightning_dalle.evaluation.logging import clip_grid, log_clip, log_image
from lightning_dalle.models.modes import evaluation_mode

MAX_CANDIDATES_AT_ONCE = 512
"""Images of one call of `generate`, or of one caption if it has more candidates."""


@dataclass(frozen=True)
class RerankingResult:
    """Candidates of one turn.

    Attributes:
        step: Optimizer updates so far.
        images: The best of each caption, best first; clips have frames before the height.
        scores: Scores of all candidates, in the order in which they were drawn.
        order: Numbers of the kept candidates: `images[c, k]` is candidate `order[c, k]` with `scores[c, order[c, k]]`.
    """

    step: int
    captions: tuple[str, ...]
    images: UInt8[Tensor, "captions keep 3 *size"]
    scores: Float[Tensor, "captions num_candidates"]
    order: Int[Tensor, "captions keep"]


class CLIPReranking(CaptionsCallback):
    """Draws candidates of fixed captions, keeps those that fit best, and logs them as one grid.

    The score of a clip is the mean of its frames' scores, and a grid of clips is a clip.

    At the end of a validation, test or prediction run. A row of the grid is a caption, best candidate first. The scorer
    lives in the callback only: it is no part of the trained model, of its optimizer or of its checkpoints. Each rank
    draws the images of its share of the captions; all ranks have the whole `result` afterwards.

    Logged beside the grid `STAGE/reranked`: `STAGE/reranking_best_score` and `STAGE/reranking_mean_score`, over
    the captions, of the best candidate and of all (not at prediction, which has no metrics).

    Args:
        scorer: A `ContrastiveModule`, or any object with `score(images, captions)`. Moved to the model's device. Called
            once for each caption, so that the caption is encoded once, with all of its candidates.
        keep: Candidates that are kept of each caption; equal scores keep the order in which they were drawn.
        every_n_validations: Turns, see `GenerationCallback`.
        generate_options: Passed on to `generate`.
        seed: Seeds the candidates.

    Attributes:
        result: Result of the last turn, None before the first.

    Raises:
        TypeError: If the scorer has no `score`, or `captions` is one string.
        ValueError: If there are no captions, or `keep` is not in 1..`num_candidates`.
    """

    def __init__(
        self,
        captions: Sequence[str],
        scorer: ImageTextScorer,
        num_candidates: int = 8,
        keep: int = 4,
        every_n_validations: int = 1,
        generate_options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(captions, every_n_validations, generate_options, seed)
        if not isinstance(scorer, ImageTextScorer):
            raise TypeError(f"scorer ({type(scorer).__name__}) must have score(images, captions)")
        if not 1 <= keep <= num_candidates:
            raise ValueError(f"keep ({keep}) must be in 1..num_candidates ({num_candidates})")
        self.scorer = scorer
        self.num_candidates = num_candidates
        self.keep = keep
        self.result: RerankingResult | None = None

    def _run_stage(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with self._sampling(trainer, pl_module):
            parts = self._rank_share(trainer, pl_module)
            images, scores, order = (self._gather_shares(trainer, part, len(self.captions)) for part in parts)
        self._check_finite(scores, trainer.global_step)
        self.result = RerankingResult(trainer.global_step, self.captions, images, scores, order)
        if stage != "predict":
            metrics = {"best_score": scores.max(dim=1).values.mean(), "mean_score": scores.mean()}
            pl_module.log_dict({f"{stage}/reranking_{name}": value for name, value in metrics.items()}, sync_dist=True)
        if trainer.is_global_zero:
            self._log_grid(trainer, f"{stage}/reranked", self.result)
        trainer.strategy.barrier(type(self).__name__)

    def _rank_share(self, trainer: Trainer, pl_module: LightningModule) -> tuple[Tensor, Tensor, Tensor]:
        """Kept images, scores and order of this rank's captions."""
        numbers = self._own_share(trainer, len(self.captions))
        captions_at_once = max(1, MAX_CANDIDATES_AT_ONCE // self.num_candidates)
        chunks = [
            self._rank_candidates(
                trainer, pl_module, [self.captions[number] for number in numbers[start:][:captions_at_once]]
            )
            for start in range(0, len(numbers), captions_at_once)
        ]
        images, scores, order = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return images, scores, order

    def _rank_candidates(
        self, trainer: Trainer, pl_module: LightningModule, captions: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        candidates = self._generate(trainer, pl_module, captions, self.num_candidates)
        scores = self._score(candidates, captions).to(candidates.device)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        return candidates[torch.arange(len(candidates)).unsqueeze(1), order], scores, order

    def _score(self, candidates: Tensor, captions: Sequence[str]) -> Tensor:
        pairs = list(zip(candidates, captions, strict=True))
        if not isinstance(self.scorer, nn.Module):
            return torch.stack([self._score_caption(images, caption) for images, caption in pairs])
        self.scorer.to(candidates.device)
        with evaluation_mode(self.scorer):
            return torch.stack([self._score_caption(images, caption) for images, caption in pairs])

    def _score_caption(self, candidates: Tensor, caption: str) -> Tensor:
        """Return the score of each candidate, of clips the mean over frames."""
        frames = candidates.transpose(1, 2).flatten(0, 1) if candidates.ndim == 5 else candidates
        return self.scorer.score(frames, [caption])[:, 0].float().unflatten(0, (len(candidates), -1)).mean(dim=1)

    def _log_grid(self, trainer: Trainer, name: str, result: RerankingResult) -> None:
        images, text = result.images.flatten(0, 1), self._describe(result)
        if images.ndim == 5:
            # No extra is needed for a .gif.
            grid = clip_grid(images, self.keep)
            log_clip(trainer.loggers, name, grid, trainer.global_step, text, suffix=".gif")
        else:
            log_image(trainer.loggers, name, make_grid(images, nrow=self.keep), trainer.global_step, text)

    def _check_finite(self, scores: Tensor, step: int) -> None:
        for caption, row in zip(self.captions, scores, strict=True):
            if not row.isfinite().all():
                raise FloatingPointError(
                    f"step {step}: scores of {caption!r} are not finite; look at scorer and images"
                )

    def _describe(self, result: RerankingResult) -> str:
        best = result.scores.gather(1, result.order)
        rows = zip(result.captions, best.tolist(), strict=True)
        return "\n".join(f"{caption}: {', '.join(f'{score:.3f}' for score in row)}" for caption, row in rows)
