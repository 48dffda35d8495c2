import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.video_autoencoder_module import (
    VideoAutoencoderModule,
    VideoAutoencoderTrainingConfig,
)
from lightning_dalle.models.video_autoencoder import CausalVideoAutoencoderConfig, VideoAutoencoder
from tests.foreign_module import LIGHTNING_WARNINGS, QUIET

pytestmark = LIGHTNING_WARNINGS
NETWORK = CausalVideoAutoencoderConfig(time_compression=2, space_compression=4, hidden_width=6)
TRAINING = VideoAutoencoderTrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.99),
    schedule=ScheduleConfig(name="cosine", total_steps=40, final_learning_rate=1e-3),
)


def shapes() -> MovingShapesDataModule:
    return MovingShapesDataModule(frames=3, height=24, width=24, num_train=320, num_val=16, batch_size=8)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """After 40 updates, with a CSV logger and a checkpoint."""
    folder = tmp_path_factory.mktemp("fitted")
    torch.manual_seed(0)
    options = {**QUIET, "logger": CSVLogger(folder, name="run", version=0)}
    trainer = Trainer(**options, max_epochs=1, log_every_n_steps=1, num_sanity_val_steps=1)
    trainer.fit(VideoAutoencoderModule(NETWORK, TRAINING), shapes())
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer


def test_training_lowers_the_error(fitted: Trainer) -> None:
    torch.manual_seed(0)
    start = Trainer(**QUIET).validate(VideoAutoencoderModule(NETWORK, TRAINING), shapes(), verbose=False)[0]
    assert fitted.callback_metrics["val/psnr"] > start["val/psnr"] + 6
    assert fitted.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3, rel=1e-15)


def test_psnr_is_that_of_encode_and_decode(fitted: Trainer) -> None:
    module: Any = fitted.lightning_module
    data = shapes()
    metrics = Trainer(**QUIET).test(module, data.val_dataloader(), verbose=False)[0]
    video = torch.cat([batch["video"] for batch in data.val_dataloader()])
    error = (module.decode(module.encode(video)).double() - video.double()).square().mean()
    assert metrics["test/psnr"] == pytest.approx(10 * math.log10(255**2 / error.item()), abs=1e-3)
    assert metrics["test/psnr"] == pytest.approx(fitted.callback_metrics["val/psnr"].item(), abs=1e-3)


def test_reconstructions_are_logged_frame_by_frame(fitted: Trainer) -> None:
    assert fitted.log_dir is not None
    assert [path.name for path in (Path(fitted.log_dir) / "images").iterdir()] == ["val-reconstructions-40.png"]


def test_checkpoint_is_a_video_autoencoder_by_itself(fitted: Trainer) -> None:
    assert fitted.log_dir is not None
    path = Path(fitted.log_dir).parents[1] / "last.ckpt"
    loaded = VideoAutoencoderModule.load_from_checkpoint(path, weights_only=True)
    assert isinstance(loaded, VideoAutoencoder)
    assert (loaded.latent_channels, loaded.latent_grid(3, 24, 24)) == (8, (2, 6, 6))
    assert (loaded.network.config, loaded.training_config) == (NETWORK, TRAINING)
    batch = next(iter(shapes().val_dataloader()))
    predictions: Any = Trainer(**QUIET).predict(loaded, shapes().val_dataloader())
    assert torch.equal(predictions[0], loaded.encode(batch["video"]))


def test_noise_is_keyed_by_seed_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(iter(shapes().val_dataloader()))

    def loss(batch_idx: int, **changes: Any) -> float:
        torch.manual_seed(0)
        module = VideoAutoencoderModule(NETWORK, dataclasses.replace(TRAINING, **changes))
        monkeypatch.setattr(module, "log", lambda *_, **__: None)
        torch.rand(5)
        return module.training_step(batch, batch_idx).item()

    assert loss(0) == loss(0)
    assert len({loss(0), loss(1), loss(0, seed=1), loss(0, latent_noise=0.0)}) == 4
    assert loss(0, latent_noise=0.0) == loss(1, latent_noise=0.0)


def test_clips_of_a_wrong_length_stop_the_run_with_the_way_out() -> None:
    data = MovingShapesDataModule(frames=4, height=24, width=24, num_train=8, num_val=8, batch_size=8)
    with pytest.raises(ValueError, match=r"frames \(4\) must be 1 more than a multiple of .* take 3 or 5"):
        Trainer(**QUIET, max_steps=1, num_sanity_val_steps=0).fit(VideoAutoencoderModule(NETWORK), data)


def test_negative_noise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"latent_noise \(-0.1\) must be at least 0"):
        VideoAutoencoderTrainingConfig(latent_noise=-0.1)


def test_configurations_may_be_mappings() -> None:
    module = VideoAutoencoderModule(dataclasses.asdict(NETWORK), {"latent_noise": 0.2})
    assert (module.network.config, module.training_config.latent_noise) == (NETWORK, 0.2)
