"""The paper's filters of web data (section 2.3): short, foreign and boilerplate captions, and extreme aspect ratios."""

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CAPTION_SUFFIXES = (".txt", ".json")


class SampleError(ValueError):
    """A file that cannot be used; the message begins with its name."""


@dataclass(frozen=True)
class Part:
    """A file, or the bytes of one inside a shard."""

    path: Path
    offset: int = 0
    length: int = -1

    def read(self) -> bytes:
        """Return the content.

        Raises:
            OSError: it cannot be read, or is shorter than it was.
        """
        content = self.read_start(self.length)
        if len(content) < self.length:
            raise OSError(f"{self.path} ends after {len(content)} of {self.length} bytes")
        return content

    def read_start(self, length: int) -> bytes:
        """Return the first bytes of the content, all of a whole file if negative."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(length if self.length < 0 else min(length, self.length))


@dataclass
class Sample:
    """The parts of one sample, by lower-cased suffix, and what to call it."""

    name: str
    parts: dict[str, Part] = field(default_factory=dict)

    def first_part(self, suffixes: Sequence[str]) -> Part | None:
        """Return the part with the first of the suffixes that there is."""
        return next((self.parts[suffix] for suffix in suffixes if suffix in self.parts), None)

    def read_caption(self) -> str:
        """Return the caption on one line: the .txt, else the entry `caption` of the .json.

        Raises:
            SampleError: there is none, it is empty, or it cannot be read.
        """
        try:
            caption = self._raw_caption()
        except (OSError, ValueError) as error:
            raise SampleError(f"{self.name}: its caption cannot be read ({error})") from error
        words = caption.split() if isinstance(caption, str) else []
        if not words:
            raise SampleError(f"{self.name}: it has no caption, or an empty one")
        return " ".join(words)

    def _raw_caption(self) -> object:
        if ".txt" in self.parts:
            return self.parts[".txt"].read().decode("utf-8-sig", "replace")
        if ".json" in self.parts:
            content = json.loads(self.parts[".json"].read())
            return content.get("caption") if isinstance(content, dict) else None
        return None


def folder_samples(folder: Path, suffixes: Sequence[str]) -> Iterator[Sample]:
    """Files of a folder and its subfolders with one of the suffixes, each with those that differ in the suffix only."""
    samples: dict[str, Sample] = {}
    for directory, subfolders, files in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for file in sorted(name for name in files if not name.startswith(".")):
            path = Path(directory, file)
            _add(samples, path.with_suffix("").relative_to(folder).as_posix(), path.suffix, Part(path), suffixes)
    return (sample for sample in samples.values() if sample.first_part(suffixes))


def shard_samples(shard: Path, report: Callable[[str], None], suffixes: Sequence[str]) -> Iterator[Sample]:
    """Samples of an uncompressed tar file, as img2dataset writes it: the parts of a sample share the name up to a dot.

    Args:
        report: Is told of damage, by the shard's name first; all that lies before the damage is used.
    """
    samples: dict[str, Sample] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            size = shard.stat().st_size
            for member in archive:
                if member.isfile() and member.offset_data + member.size <= size:
                    stem, _, suffix = Path(member.name).name.partition(".")
                    part = Part(shard, member.offset_data, member.size)
                    name = f"{shard.name}/{(Path(member.name).parent / stem).as_posix()}"
                    _add(samples, name, f".{suffix}", part, suffixes)
            _check_end(shard, archive.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        report(f"{shard}: the shard is damaged or truncated ({error})")
    return (sample for sample in samples.values() if sample.first_part(suffixes))


def _add(samples: dict[str, Sample], name: str, suffix: str, part: Part, suffixes: Sequence[str]) -> None:
    suffix = suffix.lower()
    if suffix in suffixes or suffix in _CAPTION_SUFFIXES:
        samples.setdefault(name, Sample(name)).parts[suffix] = part


def _check_end(shard: Path, offset: int) -> None:
    """A whole archive ends with a block of zeros; reading stops as quietly at garbage or a truncated end."""
    if Part(shard, offset, tarfile.BLOCKSIZE).read() != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no further file and no end of archive at byte {offset}")


MIN_WORDS = 3
MIN_ENGLISH_SHARE = 0.8
_BOILERPLATE = re.compile(
    r"\W*(?:(?:photo|image|picture|photograph|photographed|taken|captured|uploaded|created|posted|published)s?"
    r"(?: \w+)? (?:on|at|in|by|from)\b.*\d|(?:img|dsc|dscn|dscf|p|pict|image|photo|picture|untitled|file)[\W_]*\d*)\W*",
)


def rejects_caption(caption: str) -> str | None:
    """Return why the paper's kind of filter leaves a caption out, or None.

    The paper names its criteria but neither thresholds nor patterns, and uses the classifier cld3 for the language.
    Here a caption needs three words, four fifths of its letters from the basic Latin alphabet, and more than a file
    name or a date such as `photographed on 4 May 2012`.
    """
    if len(caption.split()) < MIN_WORDS:
        return "short caption"
    letters = [character for character in caption if character.isalpha()]
    if sum(character.isascii() for character in letters) < MIN_ENGLISH_SHARE * max(1, len(letters)):
        return "caption not in English"
    if _BOILERPLATE.fullmatch(caption.lower()):
        return "boilerplate caption"
    return None


def rejects_size(size: tuple[int, int], max_aspect_ratio: float) -> bool:
    """Return whether the longer side exceeds the shorter one by more than the ratio; the paper's is 2."""
    return max(size) > max_aspect_ratio * min(size)
