"""What a quickstart run is made of, and the folder that holds one run."""

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_dalle.commands.recipes import find_recipe
from lightning_dalle.ops.random import check_seed

DataName = Literal["openmoji", "shapes", "moving-shapes", "animated-emoji"]
SAMPLING_OF: dict[str, dict[str, Any]] = {
    # Learned by heart: what is not the likeliest is a step away from every picture.
    "openmoji": {"num_candidates": 8, "temperature": 0.25, "guidance_scale": 1.0},
    "shapes": {"num_candidates": 8, "temperature": 1.0, "guidance_scale": 1.5},
    "moving-shapes": {"num_candidates": 2, "guidance_scale": 1.5},
    "animated-emoji": {"num_candidates": 2, "guidance_scale": 1.0},
}
_PICTURE_STAGES = ("discrete_vae", "contrastive", "text_to_image")
TRAINED_STAGES: dict[str, tuple[str, ...]] = {
    "openmoji": _PICTURE_STAGES,
    "shapes": _PICTURE_STAGES,
    "moving-shapes": ("video_dit",),
    "animated-emoji": ("video_dit",),
}
"""What is trained on each data set, in this order; each stage has a recipe."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which pictures are drawn for the scores.

    Args:
        num_prompts: Captions of each kind. The few held-out shapes of one object are repeated to about as many.
        num_candidates: Pictures of each caption, among which the reranker chooses; None takes the data's of
            `SAMPLING_OF`.
        temperature: Temperature of the softmax over image tokens; None takes the data's of `SAMPLING_OF`.
        top_p: Draw among the most probable tokens of this share only.
        guidance_scale: Above 1 follows the caption more closely; None takes the data's of `SAMPLING_OF`.
        seed: Seeds the choice of captions and of the pictures.

    Raises:
        ValueError: If a count is out of its range.
    """

    num_prompts: int = 50
    num_candidates: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    guidance_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 2), ("num_candidates", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"sampling.{name} ({value}) must be at least {least}")

    @property
    def candidates(self) -> int:
        """Pictures of each caption."""
        assert self.num_candidates is not None, "the data's number is filled in by for_data"
        return self.num_candidates

    @property
    def distribution(self) -> dict[str, Any]:
        """What `generate` is told about the distribution that tokens are drawn from."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "guidance_scale")}
        return {name: value for name, value in values.items() if value is not None}

    def for_data(self, data: DataName) -> "Sampling":
        """With the data's own values where there are none."""
        own = {name: value for name, value in SAMPLING_OF.get(data, {}).items() if getattr(self, name) is None}
        return dataclasses.replace(self, **own)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the results depend on.

    Args:
        seed: Seeds weights, data, batches and noise of every stage.
        extra: For a stage of training, further arguments of `lightning-dalle fit`.

    Raises:
        ValueError: If there is no such data set, the seed is negative, or `extra` names no stage of training.
    """

    data: DataName
    seed: int = 0
    sampling: Sampling = Sampling()
    extra: Mapping[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data not in TRAINED_STAGES:
            raise ValueError(f"data ({self.data!r}) must be one of {', '.join(map(repr, TRAINED_STAGES))}")
        check_seed(self.seed)
        unknown = sorted(set(self.extra) - set(self.trained_stages))
        if unknown:
            raise ValueError(
                f"extra has {', '.join(unknown)}; its stages must be among {', '.join(self.trained_stages)}"
            )
        if "video_dit" in self.trained_stages:
            of_tokens = [name for name in ("temperature", "top_p") if getattr(self.sampling, name) is not None]
            if of_tokens:
                raise ValueError(f"sampling.{of_tokens[0]} has no effect on clips, which have no tokens to draw")

    @property
    def trained_stages(self) -> tuple[str, ...]:
        """What is trained, in this order."""
        return TRAINED_STAGES[self.data]

    def recipe(self, stage: str) -> Path:
        """Return the recipe file of a stage of training."""
        return find_recipe(recipe_name(self.data, stage))

    def as_mapping(self) -> dict[str, Any]:
        """Settings with the recipes' text, as they are compared and kept."""
        recipes = {stage: self.recipe(stage).read_text(encoding="utf-8") for stage in self.trained_stages}
        return {**dataclasses.asdict(self), "recipes": recipes}


def recipe_name(data: str, stage: str) -> str:
    """Return the name that `--config` takes."""
    return f"{data.replace('-', '_')}/{stage}"


class RunFolder:
    """The folder of one run: what stands in it is finished, since files appear whole or not at all.

    Args:
        path: Path of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def tokenizer(self) -> Path:
        """Trained on the captions."""
        return self.path / "tokenizer.json"

    @property
    def pictures(self) -> Path:
        """Tensors and captions that the report shows."""
        return self.path / "pictures.pt"

    @property
    def scores(self) -> Path:
        """What was measured on the pictures."""
        return self.path / "scores.json"

    @property
    def metrics(self) -> Path:
        """Scores beside their targets, time and memory; the last file of a run."""
        return self.path / "metrics.json"

    @property
    def report(self) -> Path:
        """One file for a browser."""
        return self.path / "report.html"

    @property
    def group(self) -> str:
        """The group of the W&B runs of all stages and attempts."""
        return str(json.loads((self.path / "settings.json").read_text())["group"])

    def checkpoint(self, stage: str) -> Path:
        """Return the final weights of a trained stage."""
        return self.path / f"{stage}.ckpt"

    def work(self, stage: str) -> Path:
        """Where a stage of training keeps logs and the checkpoint that it resumes from."""
        return self.path / stage

    def _delete_run(self) -> None:
        stages = dict.fromkeys(stage for trained in TRAINED_STAGES.values() for stage in trained)
        for folder in (*map(self.work, stages), self.path / "wandb"):
            shutil.rmtree(folder, ignore_errors=True)
        names = ("tokenizer.json", "pictures.pt", "scores.json", "metrics.json", "report.html", "stages.json")
        checkpoints = (self.checkpoint(stage).name for stage in stages)
        # The settings last: what is interrupted here is still known as a run.
        for name in (*names, *checkpoints, "settings.json"):
            (self.path / name).unlink(missing_ok=True)

    def claim(self, settings: Settings, fresh: bool) -> None:
        """Take the folder for a run with these settings, or take an interrupted one up.

        Args:
            fresh: Delete the files of an earlier run first, and nothing else.

        Raises:
            ValueError: If the folder holds a run with other settings, or something else.
        """
        file = self.path / "settings.json"
        held_run = _is_of_quickstart(file)
        if fresh and held_run:
            self._delete_run()
        if fresh or not held_run:
            if not held_run and self.path.exists() and any(self.path.iterdir()):
                raise ValueError(f"output ({self.path}) is not empty and holds no quickstart; choose another --output")
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(file, {**settings.as_mapping(), "group": f"quickstart-{uuid.uuid4().hex[:8]}"})
            return
        stored, wanted = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(settings.as_mapping()))
        changed = [name for name, value in wanted.items() if stored.get(name) != value]
        if changed:
            raise ValueError(
                f"output ({self.path}) holds a run with other settings ({', '.join(changed)}); "
                "choose another --output, or delete that run with --fresh=true"
            )


def _is_of_quickstart(file: Path) -> bool:
    """Return whether a file holds the settings of a run; other programs keep a settings.json, too."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and str(stored.get("group", "")).startswith("quickstart-") and "recipes" in stored


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
