"""Files of captioned samples, scanned once, broken ones counted."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lightning_dalle.data.files.samples import Part, Sample, SampleError, folder_samples, shard_samples
from lightning_dalle.data.splits import validation_mask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptionedFile:
    """A sample that looked usable when the files were scanned."""

    name: str
    content: Part
    caption: str


class BrokenFiles:
    """Counts and logs what cannot be used, and gives up beyond a share."""

    def __init__(self, path: Path, max_share: float) -> None:
        self.path = path
        self.max_share = max_share
        self.problems: list[str] = []
        self.total = 0

    def add(self, problem: str) -> None:
        """Record one unusable file; the text begins with its name."""
        if problem not in self.problems:
            logger.warning("skipped %s", problem)
            self.problems.append(problem)

    def check(self, total: int | None = None) -> None:
        """Give up if too much is unusable.

        Args:
            total: All samples, usable or not; None keeps the number given before.

        Raises:
            SampleError: more than the allowed share of the samples is unusable.
        """
        self.total = total or self.total
        if len(self.problems) > self.max_share * self.total:
            raise SampleError(
                f"{self.path}: {len(self.problems)} of {self.total} samples cannot be used, more than max_broken_share "
                f"({self.max_share}); repair or remove them, or raise it. The first: {'; '.join(self.problems[:5])}"
            )


class FilesSource:
    """Files that are decoded when they are asked for. In place of a broken one comes the next that is whole."""

    kind: str
    """What they are, in messages."""

    def __init__(self, files: Sequence[CaptionedFile], broken: BrokenFiles) -> None:
        self.files = files
        self.broken = broken

    def __len__(self) -> int:
        return len(self.files)

    def caption(self, index: int) -> str:
        """Return the caption of one file."""
        return self.files[index].caption

    def first_whole(self, index: int, decode: Callable[[Part], np.ndarray]) -> tuple[np.ndarray, str]:
        """Return the content of one file, and its caption.

        Raises:
            SampleError: too many files are broken. Each worker process counts those that it met itself.
        """
        for step in range(len(self.files)):
            file = self.files[(index + step) % len(self.files)]
            try:
                return decode(file.content), file.caption
            except OSError as error:
                self.broken.add(f"{file.name}: the {self.kind} cannot be decoded ({error})")
                self.broken.check()
        raise SampleError(f"{self.broken.path}: no {self.kind} can be decoded. The first: {self.broken.problems[0]}")


logger = logging.getLogger(__name__)
Source = TypeVar("Source", bound=FilesSource)


class FileScan:
    """What can be used of the files at a path, and why the others cannot.

    Args:
        path: A folder of files, subfolders included, or of .tar shards; or one shard.
        kind: What the files hold, in messages.
        suffixes: Suffixes of the files that are looked for, lower-cased.
        rejects: Says of a file and its caption why they are left out, None to keep them; OSError if they are broken.
        max_broken_share: An unusable share above this is an error. A damaged shard counts as one sample.

    Attributes:
        filtered: How many whole files were left out, by the reason.

    Raises:
        SampleError: there are fewer than two samples, or too many are unusable.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        suffixes: Sequence[str],
        rejects: Callable[[Part, str], str | None],
        max_broken_share: float,
    ) -> None:
        self.path = path
        self.kind = kind
        self.suffixes = suffixes
        self.rejects = rejects
        self.broken = BrokenFiles(path, max_broken_share)
        self.filtered: Counter[str] = Counter()
        self.files = list(self._usable())
        self._check()

    def splits(
        self, source: Callable[[Sequence[CaptionedFile], BrokenFiles], Source], val_share: float
    ) -> dict[str, Source]:
        """Return the files as `train` and `val`, divided by a hash of their names."""
        validation = validation_mask([file.name for file in self.files], val_share)
        return {
            split: source([self.files[index] for index in np.flatnonzero(chosen)], self.broken)
            for split, chosen in (("train", ~validation), ("val", validation))
        }

    def skipped(self) -> Counter[str]:
        """Return how many samples were left out so far, by the reason; those that are found broken later are added."""
        return self.filtered + Counter({"unusable": len(self.broken.problems)})

    def _check(self) -> None:
        num_broken = len(self.broken.problems)
        self.broken.check(total=len(self.files) + num_broken)
        if len(self.files) < 2:
            raise SampleError(
                f"path ({str(self.path)!r}) holds {len(self.files)} usable captioned {self.kind}s, at least 2 are "
                f"needed ({num_broken} unusable, {self.filtered.total()} filtered out); each {self.kind} needs a .txt "
                "or .json of the same name beside it"
            )
        logger.info(
            *("%s: %d %ss, %d skipped, filtered %s", self.path, len(self.files), self.kind),
            *(num_broken, dict(self.filtered)),
        )

    def _usable(self) -> Iterator[CaptionedFile]:
        """Yield what can be used; what cannot is added to `broken`, what is filtered out counted."""
        for sample in self._samples():
            part = sample.first_part(self.suffixes)
            assert part is not None
            try:
                caption = sample.read_caption()
                reason = self.rejects(part, caption)
            except SampleError as error:
                self.broken.add(str(error))
            except OSError as error:
                self.broken.add(f"{sample.name}: the {self.kind} cannot be read ({error})")
            else:
                if reason is None:
                    yield CaptionedFile(sample.name, part, caption)
                else:
                    self.filtered[reason] += 1

    def _samples(self) -> Iterator[Sample]:
        shards = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        for shard in shards:
            yield from shard_samples(shard, self.broken.add, self.suffixes)
        if not shards:
            yield from folder_samples(self.path, self.suffixes)


def existing_path(path: str | Path, kind: str) -> Path:
    """Return the path of a set, if there is something.

    Raises:
        FileNotFoundError: there is nothing.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"path ({str(path)!r}) does not exist; give a folder of {kind}s or a .tar shard")
    return Path(path)


def check_broken_share(max_broken_share: float) -> float:
    """Return the share, if it is one.

    Raises:
        ValueError: it is outside of [0, 1].
    """
    if not 0 <= max_broken_share <= 1:
        raise ValueError(f"max_broken_share ({max_broken_share}) must be between 0 and 1")
    return max_broken_share
