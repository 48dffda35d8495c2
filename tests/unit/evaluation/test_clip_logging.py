from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_dalle.data.files.decoding import ClipShape, decode_clip
from lightning_dalle.evaluation.logging import clip_grid, log_clip
from tests.offline_wandb import offline_wandb
from tests.unit.evaluation.test_image_logging import _MetricLogger


@pytest.fixture
def clip() -> Tensor:
    return torch.randint(0, 256, (3, 4, 6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def read(path: Path) -> np.ndarray:
    return decode_clip(path.read_bytes(), ClipShape(4, 6, 8, 5.0))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_loggers_of_figures_get_a_file_in_their_folder(kind: type, clip: Tensor, tmp_path: Path) -> None:
    logger = kind(tmp_path, name="run", version=0)
    log_clip([logger], "val/samples", clip, 7, "a red square", frame_rate=5, suffix=".webp")
    folder = tmp_path / "run" / "version_0" / "videos"
    np.testing.assert_array_equal(read(folder / "val-samples-7.webp"), clip)
    assert (folder / "val-samples-7.txt").read_text() == "a red square\n"


def test_no_caption_leaves_no_text(clip: Tensor, tmp_path: Path) -> None:
    log_clip([CSVLogger(tmp_path, name="run", version=0)], "samples", clip, 0)
    assert [path.suffix for path in (tmp_path / "run").rglob("samples*")] == [".mp4"]


@pytest.mark.parametrize(("suffix", "kept"), [(".webp", ".gif"), (".mp4", ".mp4")])
def test_offline_wandb_gets_a_file_that_it_takes(clip: Tensor, tmp_path: Path, suffix: str, kept: str) -> None:
    with offline_wandb():
        logger = WandbLogger(offline=True, save_dir=tmp_path)
        log_clip([logger], "val/samples", clip, 7, "a red square", frame_rate=5, suffix=suffix)
        logger.experiment.finish()
    (path,) = tmp_path.rglob(f"media/videos/val/samples*{kept}")
    assert read(path).shape == (3, 4, 6, 8)


def test_logger_without_clips_and_folder_is_warned_about(clip: Tensor) -> None:
    with pytest.warns(UserWarning, match="_MetricLogger takes no clips and has no folder: grid is left out"):
        log_clip([_MetricLogger()], "grid", clip, step=0)


def test_a_grid_shows_each_clip_at_its_place_in_every_frame(clip: Tensor) -> None:
    clips = torch.stack([clip, clip.flip(1), 255 - clip])
    grid = clip_grid(clips, columns=2)
    # Two pixels stand between clips and around them.
    assert grid.shape == (3, 4, 2 * (6 + 2) + 2, 2 * (8 + 2) + 2)
    assert torch.equal(grid[:, :, 2:8, 2:10], clips[0])
    assert torch.equal(grid[:, :, 2:8, 12:20], clips[1])
    assert torch.equal(grid[:, :, 10:16, 2:10], clips[2])
