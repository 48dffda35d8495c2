"""The quickstart on drawn shapes with tiny networks: what it leaves, and how it goes on after an interruption."""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_dalle.quickstart import pipeline, training
from lightning_dalle.quickstart.pipeline import run_quickstart
from lightning_dalle.quickstart.progress import StageProgressBar
from lightning_dalle.quickstart.settings import RunFolder, Sampling, Settings
from tests.offline_wandb import offline_wandb

KILLED_AT, CHECKPOINT_INTERVAL = 5, 2
COMMON = [
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=2",
    "--data.num_train=128",
    "--data.num_val=16",
    "--data.batch_size=8",
]
EXTRA = {
    "discrete_vae": [
        *COMMON,
        "--trainer.max_steps=8",
        "--trainer.val_check_interval=4",
        "--model.network.hidden_width=8",
        "--model.network.decoder_input_width=8",
    ],
    "contrastive": [
        *COMMON,
        "--trainer.max_steps=3",
        "--trainer.val_check_interval=3",
        "--model.network.vision_width=8",
        "--model.network.text_width=16",
        "--model.network.text_heads=2",
        "--model.training.schedule.warmup_steps=1",
    ],
    "text_to_image": [
        *COMMON,
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
        "--model.network.depth=2",
        "--model.network.num_heads=1",
        "--model.network.head_dim=16",
        "--model.training.schedule.warmup_steps=1",
    ],
}
SETTINGS = Settings(data="shapes", sampling=Sampling(num_prompts=8, num_candidates=2), extra=EXTRA)
STAGES = ("tokenizer", *SETTINGS.trained_stages, "pictures", "report")


def quickstart(output: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"data": "shapes", "sampling": SETTINGS.sampling, "extra": SETTINGS.extra, **changes}
    return run_quickstart(output=output, **arguments)


@pytest.fixture(scope="module", autouse=True)
def _wandb() -> Iterator[None]:
    with offline_wandb():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, _wandb: None) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    quickstart(folder)
    return folder


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.*")}


def test_a_finished_run_has_left_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    checkpoints = {f"{stage}.ckpt" for stage in SETTINGS.trained_stages}
    assert checkpoints | {"tokenizer.json", "metrics.json", "report.html", "wandb"} <= names
    assert not [name for name in names if name.endswith(".tmp")]
    assert not list(finished.glob("*/checkpoints"))
    assert (finished / "report.html").read_text().count('class="prompt"') == 16


def test_metrics_hold_figures_with_their_targets_time_and_memory(finished: Path) -> None:
    metrics = json.loads((finished / "metrics.json").read_text())
    best = metrics["metrics"]["two_object_best_of_2"]
    assert (best["target"], best["n"]) == (0.6, 8)
    assert best["met"] is (best["value"] >= 0.6)
    assert list(metrics["stages"]) == list(STAGES)
    assert all(stage["seconds"] > 0 and stage["peak_memory_mib"] > 0 for stage in metrics["stages"].values())
    assert metrics["details"]["two_object_attributes"]["best"].keys() == {"size", "colour", "shape", "relation"}


def test_every_stage_of_training_has_its_run_in_one_group_for_wandb(finished: Path) -> None:
    runs = list((finished / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == len(SETTINGS.trained_stages)
    group = RunFolder(finished).group.encode()
    assert all(group in run.read_bytes() for run in runs)


def test_a_finished_run_is_not_done_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = times(finished)
    quickstart(finished)
    after = times(finished)
    assert {name for name in before if after[name] != before[name]} == {"metrics.json"}
    shown = capsys.readouterr().out
    assert shown.count("finished earlier") == len(STAGES)
    assert "Held-out, two objects: best of 2" in shown


def test_other_settings_need_another_folder(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"other settings \(sampling\); choose another --output"):
        quickstart(finished, sampling=Sampling(num_prompts=9))


def start_and_kill(folder: Path) -> None:
    """A process that dies in the middle of the first stage of training, without a chance to save anything."""

    def kill(self: Any, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    StageProgressBar.on_train_batch_end = kill  # type: ignore[method-assign, assignment]
    training.CHECKPOINT_INTERVAL = CHECKPOINT_INTERVAL
    torch.set_num_threads(1)
    quickstart(folder)


class Stopped(Exception):
    pass


def test_a_killed_run_goes_on_from_its_last_checkpoint_as_if_nothing_had_happened(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=start_and_kill, args=(tmp_path,))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL
    folder = RunFolder(tmp_path)
    resumed_from = training.last_checkpoint(folder, "discrete_vae")
    assert resumed_from is not None
    assert resumed_from.stem == f"step={KILLED_AT // CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL}"

    def stop_here(*arguments: Any) -> None:
        raise Stopped

    monkeypatch.setattr(pipeline.Pipeline, "_stages_after", lambda self, stage: ())
    original = pipeline.train
    monkeypatch.setattr(
        pipeline, "train", lambda *arguments: original(*arguments) if arguments[2] == "discrete_vae" else stop_here()
    )
    with pytest.raises(Stopped):
        quickstart(tmp_path)

    resumed, whole = (
        torch.load(path / "discrete_vae.ckpt", weights_only=True)["state_dict"] for path in (tmp_path, finished)
    )
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert (stages["tokenizer"]["attempts"], stages["discrete_vae"]["attempts"]) == (1, 2)


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "train_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quickstart(tmp_path)
    assert "Interrupted. The same command goes on from here." in capsys.readouterr().out
    assert json.loads((tmp_path / "stages.json").read_text())["tokenizer"]["attempts"] == 1
