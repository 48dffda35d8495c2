from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dalle.quickstart.progress import StageProgressBar, format_minutes


@pytest.mark.parametrize(
    ("seconds", "text"), [(10, "under a minute"), (50, "about 1 min"), (95, "about 2 min"), (600, "about 10 min")]
)
def test_minutes_in_words(seconds: float, text: str) -> None:
    assert format_minutes(seconds) == text


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


def fit(folder: Path, module: Line, enabled: bool = True) -> None:
    bar = StageProgressBar("Reranker", later_seconds=130)
    if not enabled:
        bar.disable()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=6,
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
