"""The module around the transformer: loss, caption dropout, its self-contained checkpoint, and generation."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.functional import cross_entropy

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule, DiscreteVAETraining
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTraining
from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.sparse_transformer import SparseTransformerConfig

VAE = DiscreteVAEConfig(image_size=16, codebook_size=16, hidden_width=8, num_groups=3, blocks_per_group=1)
NETWORK = SparseTransformerConfig(
    depth=3,
    num_heads=2,
    head_dim=8,
    text_tokens=8,
    text_vocabulary_size=280,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=16,
    convolution_kernel_size=3,
)
TRAINING = TextToImageTraining(
    learning_rate=1e-2, warmup_updates=2, schedule="cosine", total_updates=30, caption_dropout=0.25
)
CAPTIONS = ["a red circle", "a blue square", "two green stars"]
TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return CaptionTokenizer.train(CAPTIONS, vocabulary_size=280).to_json()


def _module(tokenizer_json: str, **changes: Any) -> TextToImageModule:
    torch.manual_seed(0)
    parts: dict[str, Any] = {"network": NETWORK, "training": TRAINING, "discrete_vae": VAE, "tokenizer": tokenizer_json}
    return TextToImageModule(**{**parts, **changes})


def _silent(module: TextToImageModule) -> TextToImageModule:
    """For steps taken without a Trainer, where Lightning warns of each log."""
    module.log_dict = lambda *arguments, **options: None  # type: ignore[method-assign]
    return module


@pytest.fixture(scope="module")
def module(tokenizer: str) -> TextToImageModule:
    """With weights large enough that tokens depend on captions."""
    module = _module(tokenizer)
    for parameter in module.network.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    return module


def _images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def _batch() -> dict[str, Any]:
    return {"image": _images(), "caption": CAPTIONS}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _loader(batches: int = 4) -> torch.utils.data.DataLoader[Any]:
    rows = [{"image": image, "caption": CAPTIONS[0]} for image in _images(2 * batches)]
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def test_loss_weighs_text_and_image_by_their_own_counts(tokenizer: str) -> None:
    module = _silent(_module(tokenizer, training=dataclasses.replace(TRAINING, caption_dropout=0.0)))
    text = module.tokenizer.encode(CAPTIONS, 8)
    assert (text == 0).any()
    image = module.discrete_vae.encode(_images())
    text_logits, image_logits = module.network(text, image)
    text_loss = cross_entropy(text_logits[text != 0], text[text != 0])
    image_loss = cross_entropy(image_logits.flatten(0, 1), image.flatten())
    loss = module.training_step(_batch(), 0)
    torch.testing.assert_close(loss, text_loss / 8 + image_loss * 7 / 8, atol=1e-6, rtol=0)


def test_untrained_losses_are_those_of_uniform_guesses(tokenizer: str) -> None:
    module = _silent(_module(tokenizer))
    for parameter in module.network.parameters():
        torch.nn.init.zeros_(parameter)
    expected = torch.tensor(280.0).log() / 8 + torch.tensor(16.0).log() * 7 / 8
    torch.testing.assert_close(module.training_step(_batch(), 0), expected, atol=1e-5, rtol=0)


def test_text_tokens_of_the_batch_are_used_and_left_alone(tokenizer: str) -> None:
    module = _silent(_module(tokenizer, training=dataclasses.replace(TRAINING, caption_dropout=1.0)))
    tokens = torch.full((3, 8), 5)
    batch = {"image": _images(), "caption": CAPTIONS, "text_tokens": tokens}
    seen: list[torch.Tensor] = []
    handle = module.network.register_forward_pre_hook(lambda network, arguments: seen.append(arguments[0]))
    module.training_step(batch, 0)
    module.validation_step(batch, 0)
    handle.remove()
    assert seen[0].tolist() == torch.zeros(3, 8).tolist()
    assert seen[1].tolist() == tokens.tolist() == torch.full((3, 8), 5).tolist()


def test_dropped_captions_are_a_function_of_seed_step_and_batch(tokenizer: str) -> None:
    def dropped(seed: int, batch_idx: int) -> list[bool]:
        module = _silent(_module(tokenizer, training=dataclasses.replace(TRAINING, caption_dropout=0.5, seed=seed)))
        seen: list[torch.Tensor] = []
        module.network.register_forward_pre_hook(lambda network, arguments: seen.append(arguments[0]))
        module.training_step({"image": _images(64), "text_tokens": torch.ones(64, 8, dtype=torch.long)}, batch_idx)
        return (seen[0] == 0).all(1).tolist()

    first = dropped(0, 0)
    torch.rand(3)  # The global stream has no part in it.
    assert dropped(0, 0) == first
    assert dropped(0, 1) != first
    assert dropped(1, 0) != first
    # 64 draws at one half: five standard deviations are 20.
    assert 12 < sum(first) < 52


def test_training_changes_the_transformer_alone_and_learns(tokenizer: str) -> None:
    module = _module(tokenizer)
    before = copy.deepcopy(module.discrete_vae.state_dict())
    first = _silent(_module(tokenizer)).training_step(_batch(), 0).item()
    trainer = Trainer(**TRAINER, max_steps=30, gradient_clip_val=4.0)
    trainer.fit(module, _loader())
    assert all(torch.equal(value, before[name]) for name, value in module.discrete_vae.state_dict().items())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0
    assert trainer.callback_metrics["train/loss"] < first / 2
    assert {"train/loss", "train/text_loss", "train/image_loss"} <= set(trainer.callback_metrics)


def test_validation_test_and_prediction_log_and_draw(module: TextToImageModule) -> None:
    trainer = Trainer(**TRAINER)
    trainer.validate(module, _loader(1), verbose=False)
    assert set(trainer.callback_metrics) == {"val/loss", "val/text_loss", "val/image_loss"}
    trainer.test(module, _loader(1), verbose=False)
    assert set(trainer.callback_metrics) == {"test/loss", "test/text_loss", "test/image_loss"}
    first, again = (torch.cat(trainer.predict(module, _loader(1)) or []) for _ in range(2))  # type: ignore[arg-type]
    assert first.shape == (2, 1, 3, 16, 16)
    assert torch.equal(first, again)


def test_plateau_follows_the_validation_loss_in_a_trainer(tokenizer: str) -> None:
    training = TextToImageTraining(learning_rate=1.0, warmup_updates=1, plateau_interval=2, plateau_patience=0)
    module = _module(tokenizer, training=training)
    for parameter in module.network.parameters():
        parameter.requires_grad_(False)
    module.network.final_norm.bias.requires_grad_(True)
    module.validation_step = lambda batch, batch_idx: module.log("val/loss", 1.0, batch_size=2)  # type: ignore[method-assign]
    trainer = Trainer(**TRAINER, max_steps=8, val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(module, _loader(), _loader(1))
    # The first of four looks sees the best loss so far; each later one halves.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 / 8)


@pytest.fixture(scope="module")
def checkpoint(module: TextToImageModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("module") / "module.ckpt"
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return path


def test_checkpoint_is_complete_and_plain(module: TextToImageModule, checkpoint: Path) -> None:
    loaded = TextToImageModule.load_from_checkpoint(checkpoint, weights_only=True)
    options: dict[str, Any] = {"num_candidates": 2, "progress": False}
    expected = module.generate(CAPTIONS, generator=_generator(), **options)
    assert torch.equal(loaded.generate(CAPTIONS, generator=_generator(), **options), expected)
    assert loaded.training_config == TRAINING
    assert loaded.network.config == NETWORK


def test_discrete_vae_comes_from_its_checkpoint_or_as_a_network(tokenizer: str, tmp_path: Path) -> None:
    vae_module = DiscreteVAEModule(VAE, DiscreteVAETraining())
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(vae_module)
    trainer.save_checkpoint(tmp_path / "vae.ckpt")
    for source in (tmp_path / "vae.ckpt", str(tmp_path / "vae.ckpt"), vae_module.network):
        module = _module(tokenizer, discrete_vae=source)
        assert torch.equal(module.discrete_vae.encode(_images()), vae_module.encode(_images()))
        assert not any(parameter.requires_grad for parameter in module.discrete_vae.parameters())


def test_tokenizer_comes_from_a_file_too(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    module = _module(tokenizer, tokenizer=tmp_path / "tokenizer.json")
    assert module.hparams["tokenizer"] == tokenizer


def test_generate_draws_uint8_images_that_follow_generator_and_caption(module: TextToImageModule) -> None:
    images = module.generate(CAPTIONS, 2, generator=_generator(), progress=False)
    assert images.dtype == torch.uint8
    assert images.shape == (3, 2, 3, 16, 16)
    assert torch.equal(images, module.generate(CAPTIONS, 2, generator=_generator(), progress=False))
    other = torch.Generator().manual_seed(8)
    assert not torch.equal(images, module.generate(CAPTIONS, 2, generator=other, progress=False))
    alone = module.generate(CAPTIONS[1:2], 1, generator=_generator(), max_batch=1, progress=False)
    assert torch.equal(alone[0, 0], images[1, 0])


@pytest.mark.parametrize("mode", [True, False])
def test_generate_restores_modes_and_leaves_the_global_stream_alone(module: TextToImageModule, mode: bool) -> None:
    module.train(mode)
    module.network.layers[0].eval()
    modes = {name: part.training for name, part in module.named_modules()}
    state = torch.get_rng_state()
    module.generate(CAPTIONS, generator=_generator(), progress=False)
    assert {name: part.training for name, part in module.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state)
    module.train()


@pytest.mark.parametrize(("prime_rows", "kept"), [(None, 1), (1, 1), (3, 3)])
def test_generate_keeps_the_top_rows_of_a_prime(module: TextToImageModule, prime_rows: int | None, kept: int) -> None:
    prime = _images()
    before = prime.clone()
    tokens: list[torch.Tensor] = []
    decode = module.discrete_vae.decode
    module.discrete_vae.decode = lambda ids: (tokens.append(ids), decode(ids))[1]  # type: ignore[method-assign, func-returns-value]
    module.generate(CAPTIONS, prime=prime, prime_rows=prime_rows, generator=_generator(), progress=False)
    del module.discrete_vae.decode
    expected = module.discrete_vae.encode(prime)
    assert torch.equal(tokens[0][:, : 4 * kept], expected[:, : 4 * kept])
    assert not torch.equal(tokens[0], expected)
    assert torch.equal(prime, before)


def test_guidance_moves_images_and_warns_without_a_trained_empty_caption(
    module: TextToImageModule, tokenizer: str
) -> None:
    plain = module.generate(CAPTIONS, generator=_generator(), progress=False)
    guided = module.generate(CAPTIONS, generator=_generator(), guidance_scale=4.0, progress=False)
    assert not torch.equal(plain, guided)
    untrained = _module(tokenizer, training=dataclasses.replace(TRAINING, caption_dropout=0.0))
    with pytest.warns(UserWarning, match=r"guidance_scale \(2.0\) has no trained empty caption"):
        untrained.generate(CAPTIONS, guidance_scale=2.0, progress=False)


def test_progress_bar_reaches_its_end_and_can_be_switched_off(
    module: TextToImageModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    module.generate(CAPTIONS, 2, generator=_generator(), prime=_images(), prime_rows=3)
    assert "24/24" in capsys.readouterr().out
    module.generate(CAPTIONS, 2, generator=_generator(), progress=False)
    assert capsys.readouterr().out == ""


def test_progress_bar_leaves_the_console_to_a_running_trainer(
    module: TextToImageModule, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sampler(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert pl_module is module
            module.generate(CAPTIONS[:1])

    Trainer(**TRAINER, callbacks=[Sampler()]).validate(module, _loader(1), verbose=False)
    assert "Drawing" not in capsys.readouterr().out
    module.generate(CAPTIONS[:1])
    assert "Drawing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"depht": 2}}, r"network has unknown fields \['depht'\]"),
        ({"training": {"learning_rat": 2}}, r"training has unknown fields \['learning_rat'\]"),
        ({"discrete_vae": {"image_sise": 2}}, r"discrete_vae has unknown fields \['image_sise'\]"),
        ({"network": dataclasses.replace(NETWORK, grid_height=5)}, r"grid_height \(5\) and grid_width \(4\) must be 4"),
        ({"network": dataclasses.replace(NETWORK, grid_width=8)}, r"grid_height \(4\) and grid_width \(8\) must be 4"),
        (
            {"network": dataclasses.replace(NETWORK, image_vocabulary_size=32)},
            r"image_vocabulary_size \(32\) must equal the discrete VAE's codebook_size \(16\)",
        ),
        (
            {"network": dataclasses.replace(NETWORK, text_vocabulary_size=270)},
            r"text_vocabulary_size \(270\) must be at least the tokenizer's vocabulary_size",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(tokenizer: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _module(tokenizer, **changes)


def test_missing_files_are_named(tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"discrete_vae \('.*nowhere.ckpt'\) does not exist"):
        _module(tokenizer, discrete_vae=tmp_path / "nowhere.ckpt")
    with pytest.raises(FileNotFoundError, match=r"tokenizer \('.*nowhere.json'\) does not exist"):
        _module(tokenizer, tokenizer=str(tmp_path / "nowhere.json"))


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a foreign pickle was executed",))


def test_foreign_pickle_is_refused(tokenizer: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        _module(tokenizer, discrete_vae=tmp_path / "bomb.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature \(0.0\) must be positive"),
        ({"top_p": 2.0}, r"top_p \(2.0\)"),
        ({"top_k": 99}, r"top_k \(99\) must be in 1..16"),
        ({"num_candidates": 0}, r"num_candidates \(0\)"),
        ({"max_batch": 0}, r"max_batch \(0\)"),
        ({"guidance_scale": -1.0}, r"guidance_scale \(-1.0\)"),
        ({"prime_rows": 2}, r"prime_rows \(2\) has no effect without prime"),
        ({"prime": _images(), "prime_rows": 0}, r"prime_rows \(0\) must be in 1..3"),
        ({"prime": _images(), "prime_rows": 4}, r"prime_rows \(4\) must be in 1..3"),
        ({"prime": _images(2)}, "prime has 2 images for 3 captions"),
        ({"prime": _images()[:, :, :8, :8]}, r"images \(3, 3, 8, 8\) must have shape"),
    ],
)
def test_bad_arguments_of_generate_are_named(module: TextToImageModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.generate(CAPTIONS, progress=False, **options)


def test_one_string_for_captions_is_refused(module: TextToImageModule) -> None:
    with pytest.raises(TypeError, match="captions .* must be a sequence of strings"):
        module.generate("a red circle", progress=False)


def test_no_caption_is_refused(module: TextToImageModule) -> None:
    with pytest.raises(ValueError, match="at least one caption"):
        module.generate([], progress=False)


def test_network_alone_is_enough_to_build_one_on_a_released_discrete_vae(tokenizer: str) -> None:
    module = _module(tokenizer, discrete_vae=DiscreteVAE(VAE))
    assert module.hparams["discrete_vae"] == dataclasses.asdict(VAE)
