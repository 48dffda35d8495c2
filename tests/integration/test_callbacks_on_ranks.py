"""The callbacks on two ranks; apart from the loggers, which would cost each rank seconds to import."""

import os
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_dalle.callbacks import CLIPReranking, ImageGenerationMetrics, VideoSamples
from lightning_dalle.evaluation.clip_features import frame_difference
from tests.foreign_module import (
    LIGHTNING_WARNINGS,
    QUIET,
    Brightness,
    Filmer,
    MeanColour,
    Painter,
    filmed_clips,
    painted_images,
)
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
PROMPTS = ["light", "grey", "dark"]


class _CountingDDP(DDPStrategy):
    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo")
        self.barriers: list[str | None] = []

    def barrier(self, name: str | None = None) -> None:
        self.barriers.append(name)
        super().barrier(name)


def _validate_rank(rank: int, cases: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    # Tells Lightning that the ranks are there already.
    os.environ["LOCAL_RANK"] = str(rank)
    return [_validate(rank, shares, folder / str(shares[0])) for shares in cases]


def _validate(rank: int, shares: list[int], folder: Path) -> dict[str, Any]:
    start = sum(shares[:rank])
    images = painted_images()[start : start + shares[rank]]
    captions = ["dark", "grey", "light", "dark"][start : start + shares[rank]]
    batches: Any = [{"image": images, "caption": captions}]
    reranking = CLIPReranking(PROMPTS, Brightness(), num_candidates=4, keep=2)
    metrics = ImageGenerationMetrics(MeanColour(), num_images=4, max_batch=2, cache_folder=folder)
    painter, strategy = Painter(), _CountingDDP()
    settings = {**QUIET, "devices": 2, "strategy": strategy, "callbacks": [reranking, metrics]}
    Trainer(**settings).validate(painter, DataLoader(batches, batch_size=None), verbose=False)
    assert reranking.result is not None
    return {
        "images": reranking.result.images,
        "scores": reranking.result.scores,
        "order": reranking.result.order,
        "metrics": metrics.scores,
        "calls": [call["captions"] for call in painter.calls],
        "barriers": [name for name in strategy.barriers if name in ("CLIPReranking", "ImageGenerationMetrics")],
    }


def test_ranks_share_the_work_whatever_each_has_of_the_validation_set(tmp_path: Path) -> None:
    # The second rank has fewer images, then none at all. num_images (4) is 2 on each rank.
    cases = [[3, 1], [4, 0]]
    by_rank = run_ranks(_validate_rank, 2, cases, tmp_path, timeout=180)
    for (first, second), num_images in zip(zip(*by_rank, strict=True), [3, 2], strict=True):
        for name in ("images", "scores", "order", "metrics"):
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
        assert first["metrics"]["num_scored_images"] == num_images
        # One call for the prompts, one for the metrics: as often on each rank.
        assert [len(first["calls"]), len(second["calls"])] == [2, 2]
        assert first["barriers"] == second["barriers"] == ["CLIPReranking", "ImageGenerationMetrics"]
        # The last prompt fills the second rank's share and is counted once.
        assert (first["calls"][0], second["calls"][0]) == (["light", "grey"], ["dark", "dark"])
        means = first["images"].double().mean(dim=(2, 3, 4))
        assert first["images"].shape == (3, 2, 3, 8, 8)
        torch.testing.assert_close(means.float(), first["scores"].gather(1, first["order"]))
        assert means[0].min() > means[1].max() > means[1].min() > means[2].max()


def _film_rank(rank: int, shares: list[int], folder: Path) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    start = sum(shares[:rank])
    batch = {"video": filmed_clips()[start : start + shares[rank]], "caption": ["grey"] * shares[rank]}
    reranking = CLIPReranking(PROMPTS, Brightness(), num_candidates=4, keep=2)
    metrics = ImageGenerationMetrics(MeanColour(), num_images=4, max_batch=2, cache_folder=folder)
    samples = VideoSamples(PROMPTS, suffix=".gif")
    settings = {**QUIET, "devices": 2, "strategy": _CountingDDP(), "callbacks": [reranking, metrics, samples]}
    trainer, batches = Trainer(**settings), cast(Any, [batch])
    trainer.validate(Filmer(), DataLoader(batches, batch_size=None), verbose=False)
    assert reranking.result is not None
    assert samples.clips is not None
    motion = {name: value for name, value in trainer.callback_metrics.items() if "motion" in name}
    return {"best": reranking.result.images, "metrics": metrics.scores, "clips": samples.clips, "motion": motion}


def test_ranks_share_the_work_on_clips(tmp_path: Path) -> None:
    # num_images (4) is 2 on each rank: of the first rank's 3 clips one is left out.
    first, second = run_ranks(_film_rank, 2, [3, 1], tmp_path, timeout=180)
    for name in ("best", "metrics", "clips", "motion"):
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    assert (first["metrics"]["num_scored_clips"], first["metrics"]["num_scored_images"]) == (3, 9)
    assert first["best"].shape == (3, 2, 3, 3, 8, 8)
    assert first["clips"].shape == (3, 1, 3, 3, 8, 8)
    by_rank = [frame_difference(clips).mean() for clips in (filmed_clips()[:3], filmed_clips()[3:4])]
    torch.testing.assert_close(first["motion"]["val/data_motion"], torch.stack(by_rank).mean())
