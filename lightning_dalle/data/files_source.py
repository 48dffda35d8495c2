"""Images or clips in files, decoded when they are asked for."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_dalle.data.sample_files import Part, SampleError

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
        """The caption of one file."""
        return self.files[index].caption

    def first_whole(self, index: int, decode: Callable[[Part], np.ndarray]) -> tuple[np.ndarray, str]:
        """The content of one file, and its caption.

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
