"""What a run has left in its folder, as the report and the console show it."""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dalle.quickstart.evaluation import EvaluationMetric
from lightning_dalle.quickstart.settings import RunFolder

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
        """Read them from the folder of a run whose pictures have been evaluated."""
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
