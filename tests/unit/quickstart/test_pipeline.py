from pathlib import Path

import pytest
import torch

from lightning_dalle.quickstart import pipeline
from lightning_dalle.quickstart.pictures import Models
from lightning_dalle.quickstart.pipeline import TITLES, TYPICAL_SECONDS, Pipeline
from lightning_dalle.quickstart.scoring import judge
from lightning_dalle.quickstart.settings import TRAINED_STAGES, RunFolder, Sampling, Settings
from tests.unit.quickstart.fakes import fake_models


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
    monkeypatch.setattr(pipeline, "print_figures", lambda *arguments: None)
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


def test_the_remaining_time_follows_the_speed_of_this_machine(work: tuple[Pipeline, list[str]]) -> None:
    made, _ = work
    made.run()
    made.log.stages = {"discrete_vae": {"seconds": 2 * TYPICAL_SECONDS["shapes"]["discrete_vae"]}}
    for stage in ("contrastive", "text_to_image"):
        made.folder.checkpoint(stage).unlink()
    assert made._expected_seconds("contrastive") == 2 * TYPICAL_SECONDS["shapes"]["contrastive"]
    assert made._later_seconds("report") == 0


def test_pictures_of_other_data_cannot_be_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Models, "load", lambda folder: fake_models(lambda caption: torch.zeros(3, 8, 8), [], 192))
    with pytest.raises(
        TypeError, match="data \\(object\\) must be OpenMoji, CaptionedShapes, MovingShapes or AnimatedEmoji"
    ):
        judge(RunFolder(tmp_path), object(), Sampling())  # type: ignore[arg-type]
