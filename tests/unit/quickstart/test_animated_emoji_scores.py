from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dalle.data.emoji.animated import ARCHIVE_NAME, AnimatedEmojiDataModule
from lightning_dalle.quickstart.settings import Sampling
from lightning_dalle.quickstart.video_scores import evaluate_animated_emoji
from tests.unit.data.test_animated_emoji import write_archive
from tests.unit.quickstart.fakes import FakeTextToImage

SAMPLING = Sampling(num_prompts=3, num_candidates=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> AnimatedEmojiDataModule:
    cache: Path = tmp_path_factory.mktemp("cache")
    write_archive(cache / ARCHIVE_NAME)
    return AnimatedEmojiDataModule(frames=6, height=12, width=16, val_share=0.3, cache=cache)


def values(data: AnimatedEmojiDataModule, right_clip: Any, right_candidates: list[int]) -> dict[str, Any]:
    module = FakeTextToImage(right_clip, right_candidates)
    evaluation = evaluate_animated_emoji(module, data, SAMPLING)  # type: ignore[arg-type]
    assert set(evaluation.prompts[0].pictures.captions) <= set(data.captions("train"))
    assert evaluation.prompts[0].originals is not None
    assert evaluation.prompts[0].correct.double().mean() == evaluation.metrics[0].value
    return {metric.key: metric for metric in evaluation.metrics}


def right_clip(data: AnimatedEmojiDataModule, caption: str) -> np.ndarray:
    source = data.source("all")
    return source.clip(source.captions.index(caption))[0]


def test_right_clips_bear_their_caption_and_move_as_much(data: AnimatedEmojiDataModule) -> None:
    metrics = values(data, lambda caption: right_clip(data, caption), [0, 1, 2, 3])
    assert metrics["caption_match"].value == 1
    assert metrics["caption_match"].n == 4 * len(set(data.captions("train")))
    assert metrics["motion_ratio"].value == pytest.approx(1)
    assert metrics["motion_agreement"].met


def test_clips_of_another_emoji_do_not_bear_the_caption(data: AnimatedEmojiDataModule) -> None:
    captions = data.captions("all")
    another = {caption: captions[index - 1] for index, caption in enumerate(captions)}
    metrics = values(data, lambda caption: right_clip(data, another[caption]), [0, 1, 2, 3])
    assert metrics["caption_match"].value == 0


@pytest.mark.parametrize("change", ["still", "wild"])
def test_too_little_and_too_much_motion_are_both_seen(data: AnimatedEmojiDataModule, change: str) -> None:
    def clip(caption: str) -> np.ndarray:
        real = right_clip(data, caption)
        if change == "still":
            return np.repeat(real[:, :1], real.shape[1], axis=1)
        wild = np.zeros_like(real)
        wild[:, ::2] = 255
        return wild

    metrics = values(data, clip, [0, 1, 2, 3])
    assert (metrics["motion_ratio"].value < 0.5) == (change == "still")
    assert metrics["motion_agreement"].value < 0.5
    assert not metrics["motion_agreement"].met
