import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dalle.quickstart import rehearsal
from lightning_dalle.quickstart.expected_time import Pace
from lightning_dalle.quickstart.rehearsal import MAX_UPDATES, MIN_UPDATES, UpdateTimer, rehearse
from lightning_dalle.quickstart.settings import RunFolder, Settings
from lightning_dalle.quickstart.training import train_tokenizer
from tests.unit.quickstart.clocks import Clock

SMALL = [
    "--trainer.accelerator=cpu",
    "--data.num_train=128",
    "--data.num_val=24",
    "--data.batch_size=8",
]
EXTRA = {
    "discrete_vae": [*SMALL, "--model.network.hidden_width=8", "--model.network.decoder_input_width=8"],
    "contrastive": [*SMALL, "--model.network.vision_width=8", "--model.network.text_width=16"],
    "text_to_image": [*SMALL, "--model.network.depth=1", "--model.network.num_heads=1"],
}


class Timed(LightningModule):
    """Takes as long as it is told to, and remembers what it was shown."""

    def __init__(self, seconds: Callable[[int], float], clock: Clock) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seconds = seconds
        self.clock = clock
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["image"])
        self.clock.pass_seconds(self.seconds(batch_idx))
        return self.layer(batch["image"]).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.clock.pass_seconds(4.0 if batch_idx == 0 else 2.0)

    def on_validation_epoch_end(self) -> None:
        self.clock.pass_seconds(7.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def time_updates(folder: Path, seconds: Callable[[int], float], max_steps: int = 400) -> tuple[Pace, Timed]:
    clock = Clock()
    timer, module = UpdateTimer(clock), Timed(seconds, clock)
    clock.pass_seconds(5.0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer],
        default_root_dir=folder,
    )
    samples: Sequence[dict[str, Tensor]] = [{"image": torch.full((1,), float(index))} for index in range(200)]
    loader = DataLoader(samples)  # type: ignore[arg-type, var-annotated]
    trainer.fit(module, loader, loader)
    return timer.pace(validation_batches=10), module


def test_the_pace_is_that_after_slow_first_updates(tmp_path: Path) -> None:
    pace, module = time_updates(tmp_path, lambda update: 1.0 if update < 2 else 0.2)
    assert pace == Pace(
        start_seconds=5.0,
        update_seconds=pytest.approx(0.2),  # type: ignore[arg-type]
        validation_seconds=pytest.approx(10 * 2.0 + 7.0),  # type: ignore[arg-type]
        updates=400,
        validations=4,
    )
    assert len(module.seen) == MIN_UPDATES


@pytest.mark.parametrize(("seconds", "updates"), [(30.0, 2), (1.0, MIN_UPDATES), (0.3, 7), (0.01, MAX_UPDATES)])
def test_fast_updates_are_timed_more_often(tmp_path: Path, seconds: float, updates: int) -> None:
    assert len(time_updates(tmp_path, lambda update: seconds)[1].seen) == updates


def test_updates_after_the_first_find_what_a_stage_keeps_of_a_batch(tmp_path: Path) -> None:
    seen = time_updates(tmp_path, lambda update: 0.01)[1].seen
    assert all(torch.equal(images, seen[0]) for images in seen)


def test_a_stage_of_one_update_can_be_timed(tmp_path: Path) -> None:
    pace, _ = time_updates(tmp_path, lambda update: 0.5, max_steps=1)
    assert (pace.update_seconds, pace.updates, pace.validations, pace.validation_seconds) == (0.5, 1, 0, 0.0)


def random_states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_a_rehearsal_of_real_recipes_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "UPDATE_SECONDS", 0.0)
    settings, folder = Settings(data="shapes", extra=EXTRA), RunFolder(tmp_path / "run")
    folder.claim(settings, fresh=False)
    train_tokenizer(settings, folder)
    files, states = sorted(folder.path.rglob("*")), random_states()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(rehearsal.tempfile, "tempdir", str(scratch))
    paces = rehearse(settings, folder, settings.trained_stages)
    assert sorted(folder.path.rglob("*")) == files
    assert not list(scratch.iterdir())
    assert random_states() == states
    trainers = {stage: yaml.safe_load(settings.recipe(stage).read_text())["trainer"] for stage in paces}
    assert {stage: pace.updates for stage, pace in paces.items()} == {
        stage: trainer["max_steps"] for stage, trainer in trainers.items()
    }
    assert {stage: pace.validations for stage, pace in paces.items()} == {
        stage: trainer["max_steps"] // trainer["val_check_interval"] for stage, trainer in trainers.items()
    }
    assert all(pace.update_seconds > 0 and pace.validation_seconds > 0 for pace in paces.values())
