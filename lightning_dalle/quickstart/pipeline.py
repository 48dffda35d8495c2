"""The stages one after the other; what is finished is skipped, what was interrupted goes on."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from rich.console import Console

from lightning_dalle.quickstart.evaluation import Results, print_metrics
from lightning_dalle.quickstart.expected_time import (
    TYPICAL_SECONDS,
    Pace,
    explain_slow_stages,
    format_minutes,
    seconds_without_training,
)
from lightning_dalle.quickstart.machine import StageLog, describe_machine, measure_speed, training_precision
from lightning_dalle.quickstart.rehearsal import rehearse
from lightning_dalle.quickstart.report import write_report
from lightning_dalle.quickstart.scoring import evaluate
from lightning_dalle.quickstart.settings import DataName, RunFolder, Sampling, Settings, write_json
from lightning_dalle.quickstart.training import data_module, last_checkpoint, train, train_tokenizer, updates_done

TITLES = {
    "tokenizer": "Tokenizer",
    "discrete_vae": "Discrete VAE",
    "contrastive": "Reranker",
    "text_to_image": "Transformer",
    "video_dit": "Video transformer",
    "pictures": "Pictures",
    "report": "Report",
}


def run_quickstart(
    data: DataName = "openmoji",
    output: str | Path = "runs/quickstart",
    fresh: bool = False,
    seed: int = 0,
    sampling: Sampling = Sampling(),
    extra: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Run the whole recipe of the DALL-E paper, small: captions to ranked and scored pictures, with a report.

    Trains what the packaged recipes `DATA/discrete_vae`, `DATA/contrastive` and `DATA/text_to_image` say, draws
    pictures and measures them; of data that move, what `DATA/video_dit` says, and clips. The output folder gets the
    checkpoints, `report.html`, `metrics.json` and offline W&B runs.
    Interrupted, the same call goes on from the last checkpoint; finished, it only prints the metrics.

    Args:
        data: Real drawings, still or moving, or drawn shapes that an oracle reads back, still or moving.
        output: Folder of the run.
        fresh: Delete an earlier run in that folder first.
        seed: Seeds weights, data, batches and noise of every stage.
        sampling: What is drawn for the scores.
        extra: For stages of training (`discrete_vae`, `contrastive` and `text_to_image`, or `video_dit`), further
            arguments of `lightning-dalle fit`, which stand above the recipe's.

    Returns:
        The content of `metrics.json`.

    Raises:
        ValueError: If a setting is out of its range, or the folder holds something else.
        ModuleNotFoundError: If the emoji are asked for and the extra `quickstart` is not installed.
    """
    settings = Settings(data=data, seed=seed, sampling=sampling.for_data(data), extra=extra or {})
    pipeline = Pipeline(settings, RunFolder(output))
    pipeline.folder.claim(settings, fresh)
    return pipeline.run()


@dataclass
class Pipeline:
    """One run of all stages.

    Args:
        settings: What to run.
        folder: Claimed for these settings.
    """

    settings: Settings
    folder: RunFolder

    def __post_init__(self) -> None:
        self.console = Console()
        self.stages = ("tokenizer", *self.settings.trained_stages, "pictures", "report")
        self.paces: dict[str, Pace] = {}
        self.expected_seconds: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Run what is not finished, and return the content of `metrics.json`."""
        self.log = StageLog(self.folder.path / "stages.json")
        try:
            for stage in self.stages:
                self._run_stage(stage)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Lightning turns the first into the second, with status 1; a bad argument has status 2.
            if getattr(stop, "code", 1) == 1:
                self.console.print("\nInterrupted. The same command goes on from here.")
            raise
        metrics = self._metrics()
        write_json(self.folder.metrics, metrics)
        print_metrics(self.console, Results.read(self.folder).metrics)
        self.console.print(f"Report: {self.folder.report}", soft_wrap=True)
        return metrics

    def _run_stage(self, stage: str) -> None:
        number = f"Stage {self.stages.index(stage) + 1}/{len(self.stages)}"
        if self._marker(stage).exists():
            self.console.print(f"[dim]{number}  {TITLES[stage]}: finished earlier")
            return
        self._forget_later_results(stage)
        remaining = self._remaining(stage)
        self.console.print(f"[bold]{number}  {TITLES[stage]}[/bold]  [dim]{remaining}")
        checkpoint = last_checkpoint(self.folder, stage)
        with self.log.measured(stage, None if checkpoint is None else checkpoint.stat().st_mtime):
            self._work(stage)()

    def _work(self, stage: str) -> Callable[[], None]:
        settings, folder = self.settings, self.folder
        if stage in settings.trained_stages:
            return lambda: train(settings, folder, stage, TITLES[stage], self.paces[stage], self._later_seconds(stage))
        work: dict[str, Callable[[], None]] = {
            "tokenizer": lambda: train_tokenizer(settings, folder),
            "pictures": lambda: evaluate(folder, data_module(settings), settings.sampling),
            "report": lambda: write_report(folder, self.log.stages, describe_machine()),
        }
        return work[stage]

    def _marker(self, stage: str) -> Path:
        """Return the file whose presence says that a stage is finished."""
        markers = {"tokenizer": self.folder.tokenizer, "pictures": self.folder.scores, "report": self.folder.report}
        return markers.get(stage) or self.folder.checkpoint(stage)

    def _forget_later_results(self, stage: str) -> None:
        """What somebody deleted is made anew, and so is everything that was made from it."""
        for later in self._stages_after(stage):
            self._marker(later).unlink(missing_ok=True)
            if later in self.settings.trained_stages:
                shutil.rmtree(self.folder.work(later), ignore_errors=True)

    def _remaining(self, stage: str) -> str:
        """Return what is left of the run, in words; the tokenizer, which timing needs, is not waited for."""
        if stage == "tokenizer":
            return ""
        if stage not in self.expected_seconds:
            self._expect((stage, *self._stages_after(stage)))
        seconds = self.expected_seconds[stage]
        if stage in self.paces:
            seconds = self.paces[stage].stage_seconds(updates_done(self.folder, stage))
        return f"all stages: {format_minutes(seconds + self._later_seconds(stage))}"

    def _later_seconds(self, stage: str) -> float:
        return sum(self.expected_seconds[later] for later in self._stages_after(stage))

    def _expect(self, stages: tuple[str, ...]) -> None:
        """Find out what stages take on this machine, and say why where it is long."""
        data, trained = self.settings.data, [stage for stage in stages if stage in self.settings.trained_stages]
        speed = measure_speed()
        if trained:
            self.console.print("[dim]Timing a few updates of each stage of training ...")
            self.paces = rehearse(self.settings, self.folder, trained)
        self.expected_seconds = {
            stage: self.paces[stage].stage_seconds()
            if stage in self.paces
            else seconds_without_training(data, stage, speed)
            for stage in stages
        }
        # With arguments of its own a stage is not the typical one.
        typical = {
            stage: seconds for stage, seconds in self.expected_seconds.items() if stage not in self.settings.extra
        }
        line = explain_slow_stages(typical, TYPICAL_SECONDS[data], TITLES, speed)
        if line is not None:
            self.console.print(f"[yellow]{line}", soft_wrap=True)

    def _metrics(self) -> dict[str, Any]:
        results = Results.read(self.folder)
        return {
            "data": self.settings.data,
            "metrics": {metric.key: metric.as_mapping() for metric in results.metrics},
            "details": results.details,
            "stages": self.log.stages,
            "total_seconds": round(sum(map(self.log.seconds, self.log.stages)), 1),
            "precision": training_precision(),
            "machine": describe_machine(),
        }

    def _stages_after(self, stage: str) -> tuple[str, ...]:
        return self.stages[self.stages.index(stage) + 1 :]


def main() -> None:
    """Run the whole recipe, or explain what is wrong with its arguments."""
    try:
        auto_cli(run_quickstart, args=sys.argv[2:], as_positional=False, prog="lightning-dalle quickstart")
    except (ModuleNotFoundError, ValueError) as error:
        print(f"lightning-dalle quickstart: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
