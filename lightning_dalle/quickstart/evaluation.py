"""Evaluation of a run: metrics, prompts, and the results that report and console show."""

import csv
import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from lightning_dalle.quickstart.pictures import RankedPictures
from lightning_dalle.quickstart.settings import RunFolder

MAX_PSNR = 99.0
"""Stands for an image without any error, whose ratio is infinite."""


@dataclass(frozen=True, kw_only=True)
class EvaluationMetric:
    """One measured value.

    Args:
        key: Name in `metrics.json`.
        label: Name for readers.
        definition: How it was measured.
        n: Pictures or captions it was measured on.
        target: Least value to reach, if there is one.
        strict: Whether the target itself is not enough.
        unit: Behind the value. Shares are of 1, and shown in `%`; differences of shares in `points`.
    """

    key: str
    label: str
    definition: str
    value: float
    n: int
    target: float | None = None
    strict: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        return self.value > self.target if self.strict else self.value >= self.target

    @property
    def value_text(self) -> str:
        """The value as readers see it."""
        return self._text(self.value)

    @property
    def target_text(self) -> str:
        """The target as readers see it; empty without one."""
        if self.target is None:
            return ""
        return f"{'>' if self.strict else '≥'} {self._text(self.target)}"

    def as_mapping(self) -> dict[str, Any]:
        """Return all fields, and whether the target is met."""
        return {**dataclasses.asdict(self), "met": self.met}

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "points":
            return f"{100 * value:+.1f} points" if value else "0 points"
        return f"{value:.1f} dB" if self.unit == "dB" else f"{value:.3g}"


def mean_psnr(
    reconstructions: UInt8[Tensor, "images 3 height width"], images: UInt8[Tensor, "images 3 height width"]
) -> float:
    """Return the ratio in dB of each image, averaged over the images."""
    ratios = peak_signal_noise_ratio(
        reconstructions.double(), images.double(), data_range=255.0, dim=(1, 2, 3), reduction="none"
    )
    return float(ratios.clamp(max=MAX_PSNR).mean())


_VERDICTS = {True: "[green]met", False: "[red]not met", None: ""}


def print_metrics(console: Console, metrics: Sequence[EvaluationMetric]) -> None:
    """A table of values beside their targets."""
    table = Table("Metric", title="Metrics", title_justify="left")
    table.add_column("Value", justify="right")
    table.add_column("Target", justify="right")
    table.add_column("")
    for metric in metrics:
        table.add_row(metric.label, metric.value_text, metric.target_text, _VERDICTS[metric.met])
    console.print(table)


@dataclass(frozen=True)
class Prompts:
    """A section of the report: captions with their candidates.

    Args:
        title: Title of the section.
        description: What the captions are, and which candidates are correct.
        pictures: Best first.
        correct: Whether each candidate is what it should be.
        originals: For captions of the training set, the pictures that bear them.
    """

    title: str
    description: str
    pictures: RankedPictures
    correct: Tensor
    originals: Tensor | None = None


@dataclass
class Evaluation:
    """All that one data set's scoring gives."""

    metrics: list[EvaluationMetric] = field(default_factory=list)
    prompts: list[Prompts] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def best_of_metrics(
    correct: Tensor, *, key: str, label: str, what: str, target: float, num_candidates: int
) -> list[EvaluationMetric]:
    """Shares of right pictures: of the first of each row, of all, and of rows with any.

    Args:
        correct: Boolean [captions, candidates], best candidate first.
        what: When a picture is right, in words that follow `share of captions whose ... `.
    """
    best, mean, any_right = (
        float(correct[:, 0].double().mean()),
        float(correct.double().mean()),
        float(correct.any(dim=1).double().mean()),
    )
    n = len(correct)
    chosen = f"the picture that the reranker puts first of {num_candidates}"
    return [
        EvaluationMetric(
            key=f"{key}_best_of_{num_candidates}",
            label=f"{label}: best of {num_candidates}",
            definition=f"Share of {n} captions where {chosen} {what}.",
            value=best,
            n=n,
            target=target,
            unit="%",
        ),
        EvaluationMetric(
            key=f"{key}_gain_of_reranking",
            label=f"{label}: gain of reranking",
            definition=f"The share above, less that of all {num_candidates} pictures of each caption ({mean:.1%}).",
            value=best - mean,
            n=n,
            # Nothing can be gained where all pictures are right.
            target=0.0 if mean < 1 else None,
            strict=True,
            unit="points",
        ),
        EvaluationMetric(
            key=f"{key}_mean_of_{num_candidates}",
            label=f"{label}: mean of {num_candidates}",
            definition=f"Share of all {correct.numel()} pictures where the picture {what}.",
            value=mean,
            n=correct.numel(),
            unit="%",
        ),
        EvaluationMetric(
            key=f"{key}_any_of_{num_candidates}",
            label=f"{label}: any of {num_candidates}",
            definition=f"Share of {n} captions where any of the {num_candidates} pictures {what}: the best that a "
            "reranker could do.",
            value=any_right,
            n=n,
            unit="%",
        ),
    ]


def reconstruction_metrics(
    originals: dict[str, Tensor], reconstructions: dict[str, Tensor], target: float | None
) -> list[EvaluationMetric]:
    """Signal-to-noise ratios of reconstructions by split; the target is that of the first."""
    return [
        EvaluationMetric(
            key=f"reconstruction_psnr_{split}",
            label=f"Reconstruction PSNR, {'validation' if split == 'val' else 'training'}",
            definition="Peak signal-to-noise ratio of each picture after the code and back, averaged over pictures.",
            value=mean_psnr(reconstructions[split], images),
            n=len(images),
            target=target if position == 0 else None,
            unit="dB",
        )
        for position, (split, images) in enumerate(originals.items())
    ]


Curves = dict[str, dict[int, float]]
"""Name of a logged value -> update -> value."""


@dataclass(frozen=True)
class Results:
    """Scores, pictures and curves of a run."""

    metrics: list[EvaluationMetric]
    details: dict[str, Any]
    pictures: dict[str, Any]
    curves: dict[str, Curves]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: RunFolder) -> "Results":
        """Return those in the folder of a run whose pictures have been evaluated."""
        scores = json.loads(folder.scores.read_text(encoding="utf-8"))
        settings = json.loads((folder.path / "settings.json").read_text(encoding="utf-8"))
        return cls(
            metrics=[EvaluationMetric(**metric) for metric in scores["metrics"]],
            details=scores["details"],
            pictures=torch.load(folder.pictures, weights_only=True),
            curves={stage: read_curves(folder.work(stage) / "logs") for stage in settings["recipes"]},
            settings=settings,
        )


def read_curves(logs: Path) -> Curves:
    """Chain the CSV logs of all attempts at a stage; where two saw the same update, the later one counts."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    attempts = sorted(logs.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    for attempt in attempts:
        with attempt.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                # A killed attempt may have left half a row.
                values = {name: text for name, text in row.items() if text and name not in (None, "epoch", "step")}
                for name, text in values.items():
                    curves[name][int(row["step"])] = float(text)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}
