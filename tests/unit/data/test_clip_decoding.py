import sys

import numpy as np
import pytest

from lightning_dalle.data.files.decoding import ClipShape, clip_extent, decode_clip, decode_loop
from tests.unit.data.clip_files import animation, frames, video

SHAPE = ClipShape(8, 12, 16, 8.0)


def in_order(pixels: np.ndarray) -> np.ndarray:
    """As [3, frames, height, width]."""
    return pixels.transpose(3, 0, 1, 2)


def encoded(kind: str, pixels: np.ndarray, frame_rate: int = 8) -> bytes:
    if kind in ("mp4", "webm"):
        return video(pixels, frame_rate, kind)
    return animation(pixels, 1000 // frame_rate, kind)


@pytest.mark.parametrize(("kind", "tolerance"), [("WEBP", 0), ("GIF", 0), ("mp4", 12), ("webm", 12)])
def test_every_frame_is_read_in_its_order(kind: str, tolerance: int) -> None:
    content = encoded(kind, frames())
    extent = clip_extent(content)
    assert extent.seconds == pytest.approx(1, abs=0.05)  # GIF counts in hundredths
    assert extent[1:] == (12, 16)
    np.testing.assert_allclose(decode_clip(content, SHAPE).astype(int), in_order(frames()), atol=tolerance)


@pytest.mark.parametrize("kind", ["WEBP", "mp4"])
@pytest.mark.parametrize(
    ("frame_rate", "numbers"), [(4.0, [2, 4, 6, 8]), (8.0, [4, 5, 6, 7]), (16.0, [5, 5, 6, 6]), (3.0, [0, 3, 6, 8])]
)
def test_frames_are_those_shown_at_even_times_around_the_middle(
    kind: str, frame_rate: float, numbers: list[int]
) -> None:
    pixels = frames(12)
    clip = decode_clip(encoded(kind, pixels), ClipShape(4, 12, 16, frame_rate))
    nearest = [int(np.abs(pixels[:, 0, 0].astype(int) - colour).sum(axis=1).argmin()) for colour in clip[:, :, 6, 8].T]
    assert nearest == numbers


@pytest.mark.parametrize("kind", ["WEBP", "mp4"])
def test_a_generator_chooses_the_crop(kind: str) -> None:
    content, shape = encoded(kind, frames(16)), ClipShape(4, 12, 16, 8.0)
    crops = {decode_clip(content, shape, np.random.default_rng(seed)).tobytes() for seed in range(12)}
    assert len(crops) > 3
    assert decode_clip(content, shape, np.random.default_rng(5)).tobytes() in crops


def test_the_middle_is_taken_in_the_proportions_asked_for() -> None:
    pixels = np.full((2, 20, 40, 3), 255, dtype=np.uint8)
    pixels[:, 5:15, 10:30] = np.array([0, 1])[:, None, None, None]
    clip = decode_clip(animation(pixels), ClipShape(2, 8, 8, 8.0))
    # The square of 20 in the middle, of which the black window keeps rows 5 to 15 and every column.
    assert clip.shape == (3, 2, 8, 8)
    assert (clip[:, :, 2:6] <= 1).all()
    assert (clip[:, :, [0, 1, 6, 7]] == 255).all()


def test_transparent_parts_are_white_in_every_frame() -> None:
    pixels = np.zeros((3, 12, 16, 4), dtype=np.uint8)
    for number in range(3):
        pixels[number, :6] = (number * 50, 0, 0, 255)
    clip = decode_clip(animation(pixels, kmax=1), ClipShape(3, 12, 16, 8.0))
    assert (clip[:, :, 6:] == 255).all()
    assert clip[0, :, 0, 0].tolist() == [0, 50, 100]


def test_a_still_has_no_length() -> None:
    assert clip_extent(animation(frames(1))).seconds == 0


def test_what_gives_no_durations_is_shown_as_browsers_do() -> None:
    assert clip_extent(animation(frames(4), 0, "GIF")).seconds == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "mp4"])
def test_what_ends_too_early_is_an_error(kind: str) -> None:
    with pytest.raises(OSError, match=r"it ends after 8 of 12 frames at 8.0 a second"):
        decode_clip(encoded(kind, frames()), ClipShape(12, 12, 16, 8.0))


@pytest.mark.parametrize("content", [b"", b"no clip at all", b"RIFF1234WEBPjunk", b"GIF89a"])
def test_what_is_no_clip_is_an_error(content: bytes) -> None:
    message = "cannot identify image file|Invalid|End of file|EOF"
    with pytest.raises(OSError, match=message):
        clip_extent(content)
    with pytest.raises(OSError, match=message):
        decode_clip(content, SHAPE)
    with pytest.raises(OSError, match="cannot identify image file"):
        decode_loop(content, 2, 8, 8)


@pytest.mark.parametrize("kind", ["WEBP", "mp4"])
def test_half_a_file_is_an_error(kind: str) -> None:
    content = encoded(kind, np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3)).astype(np.uint8))
    with pytest.raises(OSError, match="moov atom not found|Invalid data|decod|ends after|truncated"):
        decode_clip(content[: len(content) // 2], ClipShape(8, 64, 64, 8.0))


def test_sound_alone_is_no_clip() -> None:
    import io

    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    with pytest.raises(OSError, match="it has no video stream"):
        clip_extent(buffer.getvalue())


def test_a_stream_that_does_not_say_its_length_is_an_error() -> None:
    with pytest.raises(OSError, match="it does not say how long it is"):
        clip_extent(video(frames(), container="webm", live="1"))


def test_a_loop_is_covered_once_whatever_its_length() -> None:
    pixels = frames(12)
    np.testing.assert_array_equal(decode_loop(animation(pixels), 4, 12, 16), in_order(pixels[::3]))
    np.testing.assert_array_equal(decode_loop(animation(pixels[:3]), 6, 12, 16), in_order(pixels[[0, 0, 1, 1, 2, 2]]))
    np.testing.assert_array_equal(decode_loop(animation(pixels[:1]), 2, 12, 16), in_order(pixels[[0, 0]]))


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    content = video(frames())
    monkeypatch.setitem(sys.modules, "av", None)
    assert decode_clip(animation(frames()), SHAPE).shape == (3, 8, 12, 16)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dalle\[video\]"):
        clip_extent(content)
