import dataclasses
from pathlib import Path

import pytest
import torch

from lightning_dalle.quickstart import pipeline
from lightning_dalle.quickstart.expected_time import REFERENCE, TYPICAL_SECONDS, Pace, format_minutes
from lightning_dalle.quickstart.pictures import Models
from lightning_dalle.quickstart.pipeline import TITLES, Pipeline
from lightning_dalle.quickstart.scoring import evaluate
from lightning_dalle.quickstart.settings import TRAINED_STAGES, RunFolder, Sampling, Settings
from tests.unit.quickstart.fakes import fake_models

PACE = Pace(start_seconds=3.0, update_seconds=0.3, validation_seconds=12.0, updates=1500, validations=2)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Pipeline, list[str]]:
    """A pipeline whose stages only leave their files, and the list of those that ran."""
    made = Pipeline(Settings(data="shapes"), RunFolder(tmp_path))
    made.folder.claim(made.settings, fresh=False)
    ran: list[str] = []

    def leave_file(self: Pipeline, stage: str) -> object:
        def run() -> None:
            ran.append(stage)
            self._marker(stage).write_text("")

        return run

    monkeypatch.setattr(Pipeline, "_work", leave_file)
    monkeypatch.setattr(Pipeline, "_metrics", lambda self: {})
    monkeypatch.setattr(pipeline, "rehearse", lambda settings, folder, stages: dict.fromkeys(stages, PACE))
    monkeypatch.setattr(pipeline, "measure_speed", lambda: REFERENCE)
    monkeypatch.setattr(pipeline, "print_metrics", lambda *arguments: None)
    monkeypatch.setattr(pipeline.Results, "read", lambda folder: pipeline.Results([], {}, {}, {}, {}))
    return made, ran


def test_typical_times_cover_every_stage() -> None:
    for data in TRAINED_STAGES:
        settings = Settings(data=data)  # type: ignore[arg-type]
        assert tuple(TYPICAL_SECONDS[data]) == Pipeline(settings, RunFolder("run")).stages
        assert set(TYPICAL_SECONDS[data]) <= set(TITLES)


def test_stages_run_in_order_and_once(work: tuple[Pipeline, list[str]]) -> None:
    made, ran = work
    made.run()
    made.run()
    assert ran == list(made.stages)


def test_what_was_deleted_is_made_anew_with_all_that_depends_on_it(work: tuple[Pipeline, list[str]]) -> None:
    made, ran = work
    made.run()
    ran.clear()
    stale = made.folder.work("text_to_image") / "checkpoints" / "step=50.ckpt"
    stale.parent.mkdir(parents=True)
    stale.write_text("of the deleted model")
    made.folder.checkpoint("contrastive").unlink()
    made.run()
    assert ran == ["contrastive", "text_to_image", "pictures", "report"]
    assert not stale.exists()


def test_unfinished_stages_are_timed_once_before_the_first_of_them(
    work: tuple[Pipeline, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, ran = work
    made.run()
    ran.clear()
    made.folder.checkpoint("contrastive").unlink()
    rehearsals: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def rehearse(settings: Settings, folder: RunFolder, stages: list[str]) -> dict[str, Pace]:
        rehearsals.append((tuple(stages), tuple(ran)))
        return dict.fromkeys(stages, PACE)

    monkeypatch.setattr(pipeline, "rehearse", rehearse)
    Pipeline(made.settings, made.folder).run()
    assert rehearsals == [(("contrastive", "text_to_image"), ())]
    capsys.readouterr()


def test_the_run_is_told_from_what_was_timed(
    work: tuple[Pipeline, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = work
    made.run()
    shown = [line.rsplit("all stages: ")[-1].strip() for line in capsys.readouterr().out.splitlines() if "all " in line]
    others = sum(TYPICAL_SECONDS["shapes"][stage] for stage in ("pictures", "report"))
    stages = [3 * PACE.stage_seconds() + others, 2 * PACE.stage_seconds() + others, PACE.stage_seconds() + others]
    assert shown == [*map(format_minutes, stages), "under a minute", "under a minute"]


def test_an_interrupted_stage_counts_for_what_is_left_of_it(work: tuple[Pipeline, list[str]]) -> None:
    made, _ = work
    checkpoint = made.folder.work("text_to_image") / "checkpoints" / "step=1000.ckpt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({"global_step": 1000}, checkpoint)
    others = made._remaining("text_to_image")
    assert made.paces.keys() == {"text_to_image"}
    seconds = PACE.stage_seconds(done=1000) + made._later_seconds("text_to_image")
    assert others == f"all stages: {format_minutes(seconds)}"
    assert seconds < PACE.stage_seconds() / 2


@pytest.mark.parametrize(("extra", "said"), [({}, True), ({"contrastive": ["--a=1"]}, False)])
def test_a_slow_stage_says_why_before_it_starts(
    work: tuple[Pipeline, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: dict[str, list[str]],
    said: bool,
) -> None:
    made, _ = work
    made.settings = Settings(data="shapes", extra=extra)
    slow = dataclasses.replace(PACE, update_seconds=3.0, updates=400)
    usual = dataclasses.replace(PACE, update_seconds=0.01)
    monkeypatch.setattr(
        pipeline,
        "rehearse",
        lambda settings, folder, stages: {stage: slow if stage == "contrastive" else usual for stage in stages},
    )
    monkeypatch.setattr(pipeline, "measure_speed", lambda: dataclasses.replace(REFERENCE, cores=1.0))
    made.run()
    shown = capsys.readouterr().out
    typical = format_minutes(TYPICAL_SECONDS["shapes"]["contrastive"])
    line = f"Slow here: Reranker (about 20 min, typically {typical}): only 1 core can be used."
    assert shown.count("Slow here") == shown.count(line) == said
    assert not said or shown.index(line) < shown.index("Discrete VAE")


def test_pictures_of_other_data_cannot_be_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Models, "load", lambda folder: fake_models(lambda caption: torch.zeros(3, 8, 8), [], 192))
    with pytest.raises(
        TypeError,
        match="data \\(object\\) must be OpenMojiDataModule, CaptionedShapesDataModule, MovingShapesDataModule or "
        "AnimatedEmojiDataModule",
    ):
        evaluate(RunFolder(tmp_path), object(), Sampling())  # type: ignore[arg-type]
