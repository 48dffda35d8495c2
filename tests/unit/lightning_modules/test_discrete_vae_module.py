"""The discrete VAE's loss, schedules, metrics and checkpoints under a Trainer."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule, DiscreteVAETrainingConfig
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.models.discrete_vae import DiscreteVAEConfig
from lightning_dalle.ops.dvae_losses import map_pixels
from lightning_dalle.ops.schedules import CosineSchedule

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

NETWORK = DiscreteVAEConfig(image_size=8, codebook_size=12, hidden_width=8, num_groups=2, blocks_per_group=1)
TRAINING = DiscreteVAETrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=1e-4, decay_embeddings=True),
    schedule=ScheduleConfig(name="cosine", total_steps=4, final_learning_rate=1e-3),
    kl_weight=CosineSchedule(start=0.5, end=2.0, steps=4),
    temperature=CosineSchedule(start=1.0, end=0.5, steps=4),
)


class Batches:
    """A loader of the same few batches in each epoch."""

    def __init__(self, num_batches: int, batch_size: int = 4) -> None:
        generator = torch.Generator().manual_seed(num_batches)
        shape = (num_batches, batch_size, 3, 8, 8)
        self.images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"image": images} for images in self.images])


class Data(LightningDataModule):
    def train_dataloader(self) -> Batches:
        return Batches(3)

    def val_dataloader(self) -> Batches:
        return Batches(2)


def build_trainer(**arguments: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **arguments})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer after two epochs of three updates, with a CSV logger and a checkpoint."""
    folder = tmp_path_factory.mktemp("fitted")
    torch.manual_seed(0)
    trainer = build_trainer(max_epochs=2, logger=CSVLogger(folder, version=0), log_every_n_steps=1)
    trainer.fit(DiscreteVAEModule(NETWORK, TRAINING), datamodule=Data())
    trainer.save_checkpoint(log_folder(trainer) / "last.ckpt")
    return trainer


@pytest.fixture
def module() -> DiscreteVAEModule:
    torch.manual_seed(0)
    return DiscreteVAEModule(NETWORK, TRAINING)


def log_folder(trainer: Trainer) -> Path:
    assert trainer.log_dir is not None
    return Path(trainer.log_dir)


def rows_of(trainer: Trainer, column: str) -> list[float]:
    lines = [line.split(",") for line in (log_folder(trainer) / "metrics.csv").read_text().splitlines()]
    position = lines[0].index(column)
    return [float(line[position]) for line in lines[1:] if line[position]]


def test_everything_worth_watching_is_logged(fitted: Trainer) -> None:
    names = set((log_folder(fitted) / "metrics.csv").read_text().splitlines()[0].split(","))
    training = {"loss", "elb_relaxed", "kl", "temperature", "kl_weight"}
    validation = {"elb_relaxed", "elb_hard", "kl", "psnr", "codes_used", "code_perplexity"}
    assert {f"train/{name}" for name in training} | {f"val/{name}" for name in validation} <= names


def test_schedules_follow_the_updates(fitted: Trainer) -> None:
    assert rows_of(fitted, "train/temperature") == pytest.approx([TRAINING.temperature(step) for step in range(6)])
    assert rows_of(fitted, "train/kl_weight") == pytest.approx([TRAINING.kl_weight(step) for step in range(6)])
    assert fitted.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3, rel=1e-15)


def test_learning_rate_starts_at_the_start(module: DiscreteVAEModule) -> None:
    (optimizer,), _ = module.configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert {key: optimizer.defaults[key] for key in ("betas", "eps", "weight_decay")} == {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-4,
    }


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    module = DiscreteVAEModule(NETWORK, TRAINING)
    batches = Batches(1)
    batches.images[:] = batches.images[..., :1, :1]
    before = build_trainer().validate(module, batches, verbose=False)[0]
    build_trainer(max_steps=40, check_val_every_n_epoch=40).fit(module, batches, batches)
    after = build_trainer().validate(module, batches, verbose=False)[0]
    assert after["val/elb_relaxed"] > before["val/elb_relaxed"] + 0.2
    assert after["val/psnr"] > before["val/psnr"] + 3


def test_loss_and_kl_are_those_of_the_definition(module: DiscreteVAEModule, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, Any] = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))
    monkeypatch.setattr(module, "log_dict", lambda values, **_: logged.update(values))
    images = Batches(1).images[0]
    loss = module.training_step({"image": images}, 0)
    logits = module.network.encode_logits(map_pixels(images)).movedim(1, -1)
    kl = kl_divergence(Categorical(logits=logits), Categorical(logits=torch.zeros_like(logits)))
    torch.testing.assert_close(logged["train/kl"], kl.mean())
    # elb = (log density - kl) / n and loss = (kl_weight * kl - log density) / n, with 16 positions and n = 192.
    torch.testing.assert_close(loss + logged["train/elb_relaxed"], (0.5 - 1) * kl.mean() * 16 / 192)
    assert logged["train/loss"] is loss


def test_loss_does_not_change_with_the_batch_size(module: DiscreteVAEModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    monkeypatch.setattr(module, "log_dict", lambda *_, **__: None)
    monkeypatch.setattr(
        "lightning_dalle.lightning_modules.discrete_vae_module.gumbel_noise", lambda like, _: torch.zeros_like(like)
    )
    images = Batches(1).images[0]
    once, thrice = (module.training_step({"image": images.repeat(n, 1, 1, 1)}, 0) for n in (1, 3))
    torch.testing.assert_close(once, thrice)


def test_noise_is_keyed_by_seed_step_batch_and_not_by_the_global_stream(
    module: DiscreteVAEModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    monkeypatch.setattr(module, "log_dict", lambda *_, **__: None)
    batch = {"image": Batches(1).images[0]}
    first, again, other_batch = (module.training_step(batch, index).item() for index in (0, 0, 1))
    other_seed = DiscreteVAEModule(NETWORK, dataclasses.replace(TRAINING, seed=1))
    other_seed.load_state_dict(module.state_dict())
    monkeypatch.setattr(other_seed, "log", lambda *_, **__: None)
    monkeypatch.setattr(other_seed, "log_dict", lambda *_, **__: None)
    assert first == again
    assert len({first, other_batch, other_seed.training_step(batch, 0).item()}) == 3


def test_dequantisation_changes_the_target_only_in_training(module: DiscreteVAEModule) -> None:
    noisy = DiscreteVAEModule(NETWORK, dataclasses.replace(TRAINING, dequantise=True))
    noisy.load_state_dict(module.state_dict())
    trainers = [build_trainer(max_steps=1, limit_val_batches=1, num_sanity_val_steps=0) for _ in range(2)]
    validated = [
        trainer.validate(m, Batches(2), verbose=False)[0] for trainer, m in zip(trainers, (module, noisy), strict=True)
    ]
    assert validated[0] == validated[1]
    for trainer, m in zip(trainers, (module, noisy), strict=True):
        trainer.fit(m, Batches(1), Batches(1))
    losses = [trainer.callback_metrics["train/loss"].item() for trainer in trainers]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


def test_validation_figures_are_those_of_encode_and_decode(module: DiscreteVAEModule) -> None:
    batches = Batches(2)
    metrics = build_trainer().validate(module, batches, verbose=False)[0]
    images = batches.images.flatten(0, 1)
    ids = module.encode(images)
    error = (module.decode(ids).double() - images.double()).square().mean()
    frequencies = torch.bincount(ids.flatten(), minlength=12) / ids.numel()
    assert metrics["val/psnr"] == pytest.approx(10 * math.log10(255**2 / error.item()), abs=1e-3)
    assert metrics["val/codes_used"] == ids.unique().numel()
    assert metrics["val/code_perplexity"] == pytest.approx(torch.special.entr(frequencies).sum().exp().item(), rel=1e-4)
    assert metrics["val/kl"] <= math.log(12)
    test_figures = build_trainer().test(module, batches, verbose=False)[0]
    assert {name.removeprefix("test/"): value for name, value in test_figures.items()} == {
        name.removeprefix("val/"): value for name, value in metrics.items()
    }


def test_prediction_is_the_codes(module: DiscreteVAEModule) -> None:
    batches = Batches(2)
    predictions: Any = build_trainer().predict(module, batches)
    assert torch.equal(torch.cat(predictions), module.encode(batches.images.flatten(0, 1)))


def test_reconstructions_are_logged_as_a_grid(fitted: Trainer) -> None:
    folder = log_folder(fitted) / "images"
    assert sorted(path.name for path in folder.iterdir()) == ["val-reconstructions-3.png", "val-reconstructions-6.png"]


def test_checkpoint_is_self_contained_and_loads_without_executing_anything(fitted: Trainer) -> None:
    path = log_folder(fitted) / "last.ckpt"
    loaded = DiscreteVAEModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.network.config == NETWORK
    assert loaded.training_config == TRAINING
    trained = fitted.lightning_module.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())
    assert {name.split(".")[0] for name in trained} == {"network"}


def test_configurations_may_be_mappings() -> None:
    module = DiscreteVAEModule(dataclasses.asdict(NETWORK), {"temperature": {"start": 2, "end": 1, "steps": 3}})
    assert module.network.config == NETWORK
    assert module.training_config.temperature == CosineSchedule(start=2, end=1, steps=3)


def test_defaults_are_those_of_the_paper() -> None:
    training = DiscreteVAETrainingConfig()
    ends = [(s.start, s.end, s.steps) for s in (training.kl_weight, training.temperature)]
    assert ends == [(0, 6.6, 5_000), (1, 1 / 16, 150_000)]
    assert training.optimizer == OptimizerConfig(learning_rate=1e-4, weight_decay=1e-4, decay_embeddings=True)
    assert training.schedule == ScheduleConfig(name="cosine", total_steps=1_200_000, final_learning_rate=1.25e-6)
    assert not training.dequantise
    config = DiscreteVAEConfig()
    assert (config.min_log_scale, config.patch_codebook) == (None, False)


def test_patch_codebook_is_initialised_before_the_first_update() -> None:
    torch.manual_seed(0)
    module = DiscreteVAEModule(dataclasses.replace(NETWORK, patch_codebook=True), TRAINING)
    expected = DiscreteVAEModule(dataclasses.replace(NETWORK, patch_codebook=True), TRAINING)
    expected.network.initialise_patch_codebook(Data().train_dataloader().images.flatten(0, 1))
    build_trainer(max_steps=1, limit_val_batches=0).fit(module, datamodule=Data())
    table, initial = (m.network.decoder.patch.w for m in (module, expected))
    # One AdamW update at the step size .01 moves no value by more.
    assert 0 < (table - initial).abs().max() < 0.011


def test_patch_codebook_is_initialised_at_its_temperature() -> None:
    torch.manual_seed(0)
    network = dataclasses.replace(NETWORK, patch_codebook=True)
    module = DiscreteVAEModule(network, dataclasses.replace(TRAINING, patch_temperature=30.0))
    expected, other = DiscreteVAEModule(network, TRAINING), DiscreteVAEModule(network, TRAINING)
    images = Data().train_dataloader().images.flatten(0, 1)
    expected.network.initialise_patch_codebook(images, temperature=30.0)
    other.network.initialise_patch_codebook(images, temperature=1.0)
    build_trainer(max_steps=1, limit_val_batches=0).fit(module, datamodule=Data())
    table, same, different = (m.network.encoder.patch.w for m in (module, expected, other))
    # One AdamW update at the learning rate .01 moves no value by more.
    assert (table - same).abs().max() < 0.011
    assert (table - different).abs().max() > 0.05


def test_patch_codebook_is_not_initialised_twice() -> None:
    module = DiscreteVAEModule(dataclasses.replace(NETWORK, patch_codebook=True), TRAINING)
    module.network.initialise_patch_codebook(Data().train_dataloader().images.flatten(0, 1), temperature=3.0)
    before = module.network.encoder.patch.w.detach().clone()
    build_trainer(max_steps=1, limit_val_batches=0).fit(module, Batches(1), Batches(1))
    assert (module.network.encoder.patch.w - before).abs().max() < 0.011


def test_patch_codebook_without_a_data_module_is_refused() -> None:
    module = DiscreteVAEModule(dataclasses.replace(NETWORK, patch_codebook=True), TRAINING)
    with pytest.raises(ValueError, match=r"patch_codebook \(True\) is initialised from the images of a LightningDataM"):
        build_trainer(max_steps=1).fit(module, Batches(1), Batches(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_temperature": 0.0}, r"patch_temperature \(0.0\) must be above 0"),
        *(
            ({"temperature": CosineSchedule(start=start, end=end, steps=1)}, rf"temperature.{name} \(0.0\) must be")
            for start, end, name in ((0.0, 1.0, "start"), (1.0, 0.0, "end"))
        ),
    ],
)
def test_temperatures_of_zero_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiscreteVAETrainingConfig(**changes)


def test_layout_in_memory_does_not_change_the_codes(module: DiscreteVAEModule) -> None:
    images = Batches(1).images[0]
    layouts = (torch.contiguous_format, torch.channels_last)
    codes = [module.encode(images.to(memory_format=layout)) for layout in layouts]
    assert torch.equal(codes[0], codes[1])
