from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dalle.quickstart.expected_time import Pace, RemainingTime
from lightning_dalle.quickstart.progress import StageProgressBar

PACE = Pace(start_seconds=1.0, update_seconds=60.0, validation_seconds=0.0, updates=6, validations=0)


class Line(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise RuntimeError("broken batch")
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Line):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(1, 1))  # type: ignore[arg-type]


def fit(folder: Path, module: Line, enabled: bool = True) -> None:
    bar = StageProgressBar("Reranker", PACE, later_seconds=130)
    if not enabled:
        bar.disable()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=6,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[bar],
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(torch.ones(4, 1)))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_bar_counts_the_updates_of_the_whole_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Line())
    shown = capsys.readouterr().out
    assert "Reranker" in shown
    assert "6/6" in shown
    assert "all stages: about 2 min" in shown
    assert "loss" in shown


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_bar_shows_what_is_left_before_the_first_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(tmp_path, Line(fails_at=0))
    assert "about 6 min, all stages: about 8 min" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_validations_are_pauses_and_no_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("end_update", "start_validation", "end_validation"):
        monkeypatch.setattr(RemainingTime, name, lambda self, name=name: calls.append(name))
    fit(tmp_path, Validated())
    epoch = ["end_update"] * 4 + ["start_validation", "end_validation"]
    assert calls[: len(epoch)] == epoch


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_disabled_bar_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Line(), enabled=False)
    assert "Reranker" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_bar_gives_the_console_back_when_training_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="broken batch"):
        fit(tmp_path, Line(fails_at=2))
    assert "2/6" in capsys.readouterr().out
