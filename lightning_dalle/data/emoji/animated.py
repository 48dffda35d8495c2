"""Animated emoji and their names."""

import hashlib
import importlib.metadata
import logging
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.base import CaptionedDataModule, check_clip_size
from lightning_dalle.data.cache import cache_folder, cached_arrays
from lightning_dalle.data.datasets import ClipTransform
from lightning_dalle.data.emoji.openmoji import emoji_names
from lightning_dalle.data.files.decoding import decode_loop
from lightning_dalle.data.splits import check_val_share, split_indices

ATTRIBUTION = (
    "Animated emojis by Microsoft (Fluent Emoji), packaged by LobeHub (https://github.com/lobehub/fluent-emoji). "
    "License: MIT."
)
PACKAGE = "@lobehub/fluent-emoji-anim-1@1.0.0"
ARCHIVE_NAME = "lobehub-fluent-emoji-anim-1-1.0.0.tgz"
FETCH_COMMAND = "lightning-dalle fetch animated-emoji"
_SHA256 = "4c03ac178c1eabf2e2a16dd498f3cc2b92dc30ec3466ae38fdc497d4774c99ea"
_VARIATION_SELECTOR = 0xFE0F
_MIN_MOTION = 0.5
"""Mean difference of neighbouring frames in grey levels; below it a picture hardly twitches."""

logger = logging.getLogger(__name__)


def archive_path(folder: str | Path | None = None) -> Path:
    """Where the archive lies once it was fetched; `folder` is `cache_folder()` if None."""
    return Path(folder or cache_folder()) / ARCHIVE_NAME


def fetch_animated_emoji(folder: str | Path | None = None) -> Path:
    """Fetch the archive (165 MB) with npm, unless it is there, and check that it is the one that is known.

    Raises:
        FileNotFoundError: npm is not installed.
        OSError: npm failed, or what it brought is something else.
    """
    path = archive_path(folder)
    if path.is_file():
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError(
            f"npm is not installed; install it, or put the archive of the npm package {PACKAGE} at {path}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        outcome = subprocess.run([npm, "pack", PACKAGE], cwd=unfinished, capture_output=True, text=True, check=False)
        fetched = Path(unfinished, ARCHIVE_NAME)
        if outcome.returncode != 0 or not fetched.is_file():
            raise OSError(f"npm pack {PACKAGE} failed ({outcome.returncode}): {outcome.stderr.strip()[-500:]}")
        _check(fetched)
        fetched.replace(path)
    return path


def _check(archive: Path) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise OSError(f"{archive.name} has the SHA-256 {found} instead of {_SHA256}: it is damaged, or another package")


@dataclass(frozen=True)
class EmojiClips:
    """Clips of one size, their names, and how many others there were, by the reason why they are left out."""

    clips: UInt8[np.ndarray, "clips 3 frames height width"]
    captions: list[str]
    skipped: Counter[str]


def load_animated_emoji(frames: int, height: int, width: int, folder: str | Path | None = None) -> EmojiClips:
    """Return every emoji that moves and has a name, by code points; decoded once (some 20 s), then kept on disk.

    Each clip is one turn of its loop, whatever its length, at even times.

    Raises:
        FileNotFoundError: the archive was not fetched.
        ModuleNotFoundError: the extra `quickstart` is not installed.
    """
    path = archive_path(folder)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; fetch it with `{FETCH_COMMAND}`")
    versions = f"{path.stem}-emoji-{importlib.metadata.version('emoji')}-pillow-{importlib.metadata.version('pillow')}"
    name = f"{versions}-{frames}x{height}x{width}"
    arrays = cached_arrays(name, lambda: _decode_all(path, (frames, height, width)), folder)
    skipped = Counter(dict(zip(arrays["reasons"].tolist(), arrays["counts"].tolist(), strict=True)))
    return EmojiClips(arrays["clips"], arrays["captions"].tolist(), skipped)


def _decode_all(path: Path, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    skipped: Counter[str] = Counter()
    found: dict[str, np.ndarray] = {}
    for caption, content in _named(path, skipped):
        try:
            clip = decode_loop(content, *shape)
        except OSError as error:
            logger.warning("skipped %s: the clip cannot be decoded (%s)", caption, error)
            skipped["broken"] += 1
            continue
        if moves(clip):
            found[caption] = clip
        else:
            skipped["still"] += 1
    return {
        "clips": np.stack(list(found.values())) if found else np.zeros((0, 3, *shape), dtype=np.uint8),
        "captions": np.array(list(found), dtype=str),
        "reasons": np.array(list(skipped), dtype=str),
        "counts": np.array(list(skipped.values()), dtype=np.int64),
    }


def moves(clip: UInt8[np.ndarray, "3 frames height width"]) -> bool:
    """Return whether neighbouring frames differ by more than noise."""
    return bool(np.abs(np.diff(clip.astype(np.int16), axis=1)).mean() >= _MIN_MOTION) if clip.shape[1] > 1 else False


def _named(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, bytes]]:
    """Caption and content of the files that have a name, in the order of their code points."""
    # Files and names differ in where they have variation selectors.
    names = {_code_points(map(ord, characters)): caption for characters, caption in emoji_names().items()}
    with tarfile.open(path) as archive:
        members = {
            _code_points(int(code, 16) for code in Path(member.name).stem.split("-")): member
            for member in archive
            if member.name.endswith(".webp")
        }
        for code_points, member in sorted(members.items(), key=lambda item: item[0]):
            file = archive.extractfile(member)
            if code_points not in names or file is None:
                skipped["without a name"] += 1
            else:
                yield names[code_points], file.read()


def _code_points(codes: Iterable[int]) -> tuple[int, ...]:
    return tuple(code for code in codes if code != _VARIATION_SELECTOR)


class ClipArraySource:
    """Clips held in memory."""

    def __init__(self, clips: UInt8[np.ndarray, "clips 3 frames height width"], captions: list[str]) -> None:
        self.clips = clips
        self.captions = captions

    def __len__(self) -> int:
        return len(self.captions)

    def caption(self, index: int) -> str:
        """Return the caption of one clip."""
        return self.captions[index]

    def clip(
        self, index: int, generator: np.random.Generator | None = None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """Return one clip and its caption; the generator has no choice to make."""
        return self.clips[index], self.captions[index]


class AnimatedEmojiDataModule(CaptionedDataModule):
    """Fluent emoji that move and have a name, each one turn of its loop, on white.

    By Microsoft, packaged by LobeHub, MIT: show `animated.ATTRIBUTION` with them. They are fetched once
    by `lightning-dalle fetch animated-emoji` (165 MB, with npm), or by `prepare_data`.

    Splits are `train`, `val`, and `all`, both together in the order of code points.

    Args:
        frames: Frames of every clip; height and width in pixels.
        val_share: Share of the emoji kept for validation, chosen by a hash of the name.
        cache: Folder of the archive and of the decoded clips; `LIGHTNING_DALLE_CACHE` or the user's cache folder if
            None.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: from `setup` on, if the archive was not fetched.
    """

    splits = ("train", "val", "all")
    sample_name = "clips"

    def __init__(
        self,
        *,
        frames: int = 8,
        height: int = 32,
        width: int = 32,
        val_share: float = 0.05,
        cache: str | Path | None = None,
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ClipTransform(),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.frames, self.height, self.width = check_clip_size(frames, height, width)
        self.val_share = check_val_share(val_share)
        if self.frames < 2:
            raise ValueError(f"frames ({self.frames}) must be at least 2: one frame does not move")
        self.cache = cache
        self._skipped: Counter[str] = Counter()

    def prepare_data(self) -> None:
        """Fetch and decode them once per machine."""
        fetch_animated_emoji(self.cache)
        load_animated_emoji(self.frames, self.height, self.width, self.cache)

    def skipped(self) -> Counter[str]:
        """Return how many emoji of the package were left out, by the reason."""
        return Counter(self._skipped)

    def load_sources(self, split: str) -> dict[str, ClipArraySource]:
        """Decode all splits."""
        emoji = load_animated_emoji(self.frames, self.height, self.width, self.cache)
        self._skipped = emoji.skipped
        return {
            split: ClipArraySource(emoji.clips[indices], [emoji.captions[index] for index in indices])
            for split, indices in split_indices(emoji.captions, self.val_share).items()
        }
