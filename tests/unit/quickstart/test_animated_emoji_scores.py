from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dalle.data.emoji.animated import ARCHIVE_NAME, AnimatedEmojiDataModule
from lightning_dalle.quickstart.settings import Sampling
from lightning_dalle.quickstart.video_scores import judge_animated_emoji
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
    judgement = judge_animated_emoji(module, data, SAMPLING)  # type: ignore[arg-type]
    assert set(judgement.prompts[0].pictures.captions) <= set(data.captions("train"))
    assert judgement.prompts[0].originals is not None
    assert judgement.prompts[0].marks.double().mean() == judgement.figures[0].value
    return {figure.key: figure for figure in judgement.figures}


def right_clip(data: AnimatedEmojiDataModule, caption: str) -> np.ndarray:
    source = data.source("all")
    return source.clip(source.captions.index(caption))[0]


def test_right_clips_bear_their_caption_and_move_as_much(data: AnimatedEmojiDataModule) -> None:
    figures = values(data, lambda caption: right_clip(data, caption), [0, 1, 2, 3])
    assert figures["caption_match"].value == 1
    assert figures["caption_match"].n == 4 * len(set(data.captions("train")))
    assert figures["motion_ratio"].value == pytest.approx(1)
    assert figures["motion_agreement"].met


def test_clips_of_another_emoji_do_not_bear_the_caption(data: AnimatedEmojiDataModule) -> None:
    captions = data.captions("all")
    another = {caption: captions[index - 1] for index, caption in enumerate(captions)}
    figures = values(data, lambda caption: right_clip(data, another[caption]), [0, 1, 2, 3])
    assert figures["caption_match"].value == 0


@pytest.mark.parametrize("change", ["still", "wild"])
def test_too_little_and_too_much_motion_are_both_seen(data: AnimatedEmojiDataModule, change: str) -> None:
    def clip(caption: str) -> np.ndarray:
        real = right_clip(data, caption)
        if change == "still":
            return np.repeat(real[:, :1], real.shape[1], axis=1)
        wild = np.zeros_like(real)
        wild[:, ::2] = 255
        return wild

    figures = values(data, clip, [0, 1, 2, 3])
    assert (figures["motion_ratio"].value < 0.5) == (change == "still")
    assert figures["motion_agreement"].value < 0.5
    assert not figures["motion_agreement"].met
