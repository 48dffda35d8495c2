import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_dalle.data.files.decoding import ClipShape, decode_clip
from lightning_dalle.evaluation.logging import write_clip


@pytest.fixture
def clip() -> Tensor:
    """Even frames, each of a colour of its own: [3, 6, 10, 14]."""
    colours = torch.tensor([[0, 40, 80, 120, 160, 200], [250, 200, 150, 100, 50, 0], [30] * 6], dtype=torch.uint8)
    return colours[:, :, None, None].expand(3, 6, 10, 14).contiguous()


@pytest.mark.parametrize(("suffix", "tolerance"), [(".webp", 0), (".gif", 0), (".mp4", 6)])
def test_a_written_clip_is_read_back(clip: Tensor, tmp_path: Path, suffix: str, tolerance: int) -> None:
    path = write_clip(tmp_path / "new" / f"clip{suffix}", clip, frame_rate=10)
    assert path == tmp_path / "new" / f"clip{suffix}"
    read = decode_clip(path.read_bytes(), ClipShape(6, 10, 14, 10.0))
    np.testing.assert_allclose(read.astype(int), clip.numpy().astype(int), atol=tolerance)


def test_any_pixels_are_kept_by_webp(tmp_path: Path) -> None:
    clip = torch.randint(0, 256, (3, 4, 9, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    content = write_clip(tmp_path / "clip.webp", clip).read_bytes()
    np.testing.assert_array_equal(decode_clip(content, ClipShape(4, 9, 7, 8.0)), clip)


def test_a_video_is_what_browsers_play_at_its_rate_with_even_sides(clip: Tensor, tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", clip[:, :, :9, :13], frame_rate=12.5)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.height, stream.width, stream.frames) == (10, 14, 6)
        assert float(stream.average_rate or 0) == 12.5


def test_animations_go_round_at_their_rate(clip: Tensor, tmp_path: Path) -> None:
    for suffix in (".webp", ".gif"):
        with Image.open(write_clip(tmp_path / f"clip{suffix}", clip, frame_rate=20)) as image:
            image.load()
            assert (image.info["loop"], image.info["duration"]) == (0, 50)


def test_other_formats_and_rates_are_refused(clip: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path \(clip.avi\) must end with one of .mp4, .gif, .webp"):
        write_clip(tmp_path / "clip.avi", clip)
    with pytest.raises(ValueError, match=r"frame_rate \(0\) must be above 0"):
        write_clip(tmp_path / "clip.gif", clip, frame_rate=0)


def test_without_its_package_the_extra_is_named(clip: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert write_clip(tmp_path / "clip.gif", clip).is_file()
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dalle\[video\]"):
        write_clip(tmp_path / "clip.mp4", clip)
