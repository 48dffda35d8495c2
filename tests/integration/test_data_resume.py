"""A run continued from any of its checkpoints sees the very batches of the run that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer

EPOCHS, BATCHES, BATCH_SIZE = 3, 5, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class BatchRecorder(LightningModule):
    """Records epoch, number and content of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        content = (batch["image"].numpy().tobytes(), *batch["caption"], *batch["text_tokens"].flatten().tolist())
        self.seen.append((self.current_epoch, batch_idx, content))
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def shapes(tokenizer_file: Path, num_workers: int = 0) -> CaptionedShapesDataModule:
    return CaptionedShapesDataModule(
        image_size=24,
        num_train=BATCHES * BATCH_SIZE + 3,
        num_val=5,
        batch_size=BATCH_SIZE,
        tokenizer=tokenizer_file,
        text_tokens=40,
        bpe_dropout=0.3,
        augmentation="discrete_vae",
        num_workers=num_workers,
        seed=3,
    )


def fit(
    folder: Path, data: CaptionedShapesDataModule, checkpoint: str | None = None, **settings: Any
) -> list[tuple[Any, ...]]:
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        **settings,
    )
    module = BatchRecorder()
    trainer.fit(module, data, ckpt_path=None if checkpoint is None else folder / checkpoint)
    return module.seen


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    CaptionTokenizer.train(CaptionedShapesDataModule(num_train=100).captions("train"), 300).save(path)
    return path


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> dict[int, tuple[Path, list[Any]]]:
    """For 0 and 1 workers, the folder of a whole run's checkpoints, one a step, and its batches."""
    runs = {}
    for num_workers in (0, 1):
        folder = tmp_path_factory.mktemp("whole")
        runs[num_workers] = folder, fit(folder, shapes(tokenizer_file, num_workers))
    return runs


def test_every_epoch_shows_every_sample_anew(whole_runs: dict[int, tuple[Path, list[Any]]]) -> None:
    (_, alone), (_, with_worker) = whole_runs.values()
    assert alone == with_worker
    assert [entry[:2] for entry in alone] == [(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]
    assert len({content for _, _, content in alone}) == EPOCHS * BATCHES


@pytest.mark.parametrize(
    ("num_workers", "steps"), [(0, 1), (0, 4), (0, 5), (0, 7), (0, 10), (0, 14), (1, 4), (1, 5), (1, 7)]
)
def test_batches_continue_where_the_checkpoint_was_written(
    whole_runs: dict[int, tuple[Path, list[Any]]], tokenizer_file: Path, num_workers: int, steps: int
) -> None:
    folder, whole = whole_runs[num_workers]
    assert fit(folder, shapes(tokenizer_file, num_workers), f"step={steps}.ckpt") == whole[steps:]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2},
        {"limit_train_batches": 4},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_batches_continue_under_trainer_settings(
    tmp_path: Path, tokenizer_file: Path, settings: dict[str, Any]
) -> None:
    whole = fit(tmp_path, shapes(tokenizer_file), **settings)
    accumulated = settings.get("accumulate_grad_batches", 1)
    for steps in (2, 4):
        expected = whole[steps * accumulated :]
        if accumulated > 1:  # the last batch of an epoch makes a step of its own
            steps_per_epoch = -(-BATCHES // accumulated)
            expected = whole[steps // steps_per_epoch * BATCHES + steps % steps_per_epoch * accumulated :]
        assert fit(tmp_path, shapes(tokenizer_file), f"step={steps}.ckpt", **settings) == expected, steps


class RankRecorder(BatchRecorder):
    """Writes what each rank has seen to a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        torch.save(self.seen, self.folder / f"rank{self.global_rank}.pt")


def fit_ranks(folder: Path, data: CaptionedShapesDataModule, checkpoint: str | None = None) -> list[list[Any]]:
    """What each of two forked ranks has seen."""
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(RankRecorder(folder), data, ckpt_path=None if checkpoint is None else folder / checkpoint)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_ranks_have_batches_of_their_own_and_continue_with_them(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(find_free_network_port()))
    whole = fit_ranks(tmp_path, shapes(tokenizer_file))
    contents = [content for seen in whole for _, _, content in seen]
    assert len(set(contents)) == len(contents) == 2 * 2 * (BATCHES // 2)
    continued = fit_ranks(tmp_path, shapes(tokenizer_file), "step=3.ckpt")
    assert continued == [seen[3:] for seen in whole]
