"""Training of the video module: losses, dropout, packing, checkpoints, and parts that do not fit."""

import dataclasses
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_dalle.data.files.bucketing import TokenBuckets
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.lightning_modules.video_dit_training import flow_matching_loss
from lightning_dalle.models.text_encoders import TextEncoder
from lightning_dalle.models.video_dit import Prediction, VideoDiT
from lightning_dalle.ops.flow_matching import TimestepDensity
from lightning_dalle.ops.rope import RotaryGridConfig
from tests.unit.lightning_modules.tiny_video_dit import (
    CAPTIONS,
    NETWORK,
    TEXT,
    TRAINER,
    TRAINING,
    HalvingAutoencoder,
    LengthEncoder,
    clips,
    loader,
    tiny_module,
    tokenizer_json,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def _batch() -> dict[str, Any]:
    return {"video": clips(), "caption": CAPTIONS}


def _loss(module: VideoDiTModule, batch: dict[str, Any], batch_idx: int = 0) -> torch.Tensor:
    logged: dict[str, torch.Tensor] = {}
    module.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign]
    try:
        loss = module.training_step(batch, batch_idx)
    finally:
        del module.log
    assert list(logged) == ["train/loss"]
    return loss


@pytest.mark.parametrize("prediction", ["velocity", "clean"])
def test_training_lowers_the_loss_of_clips_it_sees(prediction: Prediction) -> None:
    module = tiny_module(
        network=dataclasses.replace(NETWORK, prediction=prediction),
        training=dataclasses.replace(TRAINING, caption_dropout=0.0, first_frame_share=0.0),
    )
    rows = [{"video": torch.full((3, 4, 8, 8), shade, dtype=torch.uint8), "caption": "red"} for shade in [30] * 16]
    data: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    before = Trainer(**TRAINER).validate(module, data, verbose=False)[0]["val/loss"]
    Trainer(**TRAINER, max_epochs=40, limit_val_batches=0).fit(module, data, data)
    after = Trainer(**TRAINER).validate(module, data, verbose=False)[0]["val/loss"]
    assert after < 0.5 * before


def test_loss_is_that_of_the_line_between_the_clip_and_its_noise() -> None:
    network = VideoDiT(NETWORK)
    latents, times, text = torch.randn(2, 3, 4, 8, 8), torch.tensor([0.3, 0.9]), torch.zeros(2, 8, 16)
    noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    seen: list[Any] = []
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    # Its velocities are 0 before training.
    loss = flow_matching_loss(network, latents, text, times, None, torch.Generator().manual_seed(5))
    torch.testing.assert_close(loss, (noise - latents).square().mean())
    torch.testing.assert_close(
        seen[0][0], (1 - times.view(2, 1, 1, 1, 1)) * latents + times.view(2, 1, 1, 1, 1) * noise
    )
    known = torch.tensor([True, False])
    loss = flow_matching_loss(network, latents, text, times, known, torch.Generator().manual_seed(5))
    squares = (noise - latents).square()
    torch.testing.assert_close(loss, torch.cat([squares[0, :, 1:].flatten(), squares[1].flatten()]).mean())
    torch.testing.assert_close(seen[1][0][0, :, 0], latents[0, :, 0])
    torch.testing.assert_close(seen[1][0][1], seen[0][0][1])


def test_packed_batch_has_the_loss_of_all_its_values() -> None:
    network = tiny_module(std=0.3).network
    latents = [torch.randn(3, *size) for size in ((4, 8, 8), (2, 4, 8))]
    times, text = torch.tensor([0.3, 0.9]), torch.randn(2, 8, 16)
    loss = flow_matching_loss(
        network, latents, text, times, torch.tensor([True, False]), torch.Generator().manual_seed(5)
    )
    generator = torch.Generator().manual_seed(5)
    alone = [
        flow_matching_loss(
            network, latents[index].unsqueeze(0), text[index : index + 1], times[index : index + 1], known, generator
        )
        for index, known in enumerate((torch.tensor([True]), None))
    ]
    counts = 3 * 3 * 64, 3 * 2 * 32
    expected = sum(count * part for count, part in zip(counts, alone, strict=True)) / sum(counts)
    torch.testing.assert_close(loss, expected)


def test_steps_draw_anew_and_repeat_exactly() -> None:
    module = tiny_module(std=0.3)
    losses = [_loss(module, _batch(), index).item() for index in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    # Validations are to be compared with each other.
    results = [Trainer(**TRAINER).validate(module, loader(1), verbose=False)[0]["val/loss"] for _ in range(2)]
    assert results[0] == results[1]
    assert Trainer(**TRAINER).test(module, loader(1), verbose=False)[0]["test/loss"] == results[0]


def test_density_of_times_is_that_of_the_settings() -> None:
    seen: dict[str, torch.Tensor] = {}
    for density in get_args(TimestepDensity):
        module = tiny_module(std=0.3, training=dataclasses.replace(TRAINING, time_density=density, shift=1.0))
        drawn: list[torch.Tensor] = []
        module.network.register_forward_pre_hook(lambda _, inputs, drawn=drawn: drawn.append(inputs[1]))
        for step in range(60):
            _loss(module, _batch(), step)
        seen[density] = torch.cat(drawn)
    # A logit-normal time is rarely near an end, a uniform one a fifth of the time.
    at_ends = {density: ((times - 0.5).abs() > 0.4).float().mean().item() for density, times in seen.items()}
    assert at_ends["logit_normal"] < 0.08
    assert 0.1 < at_ends["uniform"] < 0.3


def test_captions_are_dropped_at_their_share() -> None:
    batch = {**_batch(), "caption": ["a", "b", "c"]}
    losses = {}
    for share in (0.0, 1.0):
        module = tiny_module(std=0.3, training=dataclasses.replace(TRAINING, caption_dropout=share))
        losses[share] = [_loss(module, {**batch, "caption": [caption] * 3}).item() for caption in CAPTIONS]
    assert len(set(losses[0.0])) == 3
    assert len(set(losses[1.0])) == 1


def test_larger_clips_are_learned_at_times_nearer_to_noise() -> None:
    module = tiny_module(training=dataclasses.replace(TRAINING, shift=2.0))
    assert module._shift((4, 8, 8)) == pytest.approx(2.0)
    assert module._shift((4, 16, 16)) == pytest.approx(4.0)


def test_batches_of_several_sizes_are_packed() -> None:
    module = tiny_module(std=0.3)
    videos = [clips(1)[0], clips(1, (2, 4, 8))[0], clips(1, (1, 8, 4))[0]]
    loss = _loss(module, {"video": videos, "caption": CAPTIONS})
    loss.backward()
    assert loss.isfinite()
    with pytest.raises(ValueError, match="time has 6 tokens, more than the 4 of original_max_position_embeddings"):
        _loss(module, {"video": clips(3, (6, 8, 8)), "caption": CAPTIONS})


@pytest.mark.parametrize("buckets", [None, [(4, 8, 8), (2, 8, 8)]], ids=["packed", "padded"])
def test_one_run_takes_clips_of_several_sizes(buckets: list[tuple[int, int, int]] | None) -> None:
    sizes = [(4, 8, 8), (2, 4, 8), (1, 8, 4), (4, 8, 8), (2, 8, 8)]
    rows = [{"video": clips(1, size)[0], "caption": CAPTIONS[index % 3]} for index, size in enumerate(sizes)]
    sampler = TokenBuckets(sizes, max_tokens=20, token_size=(1, 4, 4), buckets=buckets)
    data: Any = torch.utils.data.DataLoader(rows, batch_sampler=sampler, collate_fn=sampler.collate)  # type: ignore[arg-type]
    module = tiny_module()
    trainer = Trainer(**TRAINER, max_epochs=1)
    trainer.fit(module, data, loader(1))
    assert trainer.global_step == len(sampler)
    assert torch.stack([part.isfinite().all() for part in module.parameters()]).all()


def test_precomputed_latents_and_features_take_the_encoders_place() -> None:
    module = tiny_module(std=0.3)
    expected = _loss(module, _batch())
    latents, features = module.autoencoder.encode(clips()), module.text_encoder.encode(CAPTIONS)
    torch.testing.assert_close(_loss(module, {"latents": latents, "text_features": features}), expected)


def test_foreign_encoder_and_autoencoder_serve(tmp_path: Path) -> None:
    network = dataclasses.replace(NETWORK, channels=12, patch_size=(1, 2, 2))
    parts: dict[str, Any] = {"text_encoder": LengthEncoder(), "tokenizer": None, "autoencoder": HalvingAutoencoder()}
    module = tiny_module(std=0.3, network=network, **parts)
    encoder = module.text_encoder
    assert isinstance(encoder, TextEncoder)
    assert isinstance(encoder, LengthEncoder)
    trainer = Trainer(**{**TRAINER, "enable_checkpointing": True}, max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, loader(2), loader(1))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert "text_encoder.scale" in trained
    assert not any(name.startswith("autoencoder") for name in trained)
    assert isinstance(module.autoencoder, HalvingAutoencoder)
    assert float(module.autoencoder.scale) == 2
    assert (encoder.scale != 1).any()
    trainer.save_checkpoint(tmp_path / "module.ckpt")
    fresh: dict[str, Any] = {"text_encoder": LengthEncoder(), "autoencoder": HalvingAutoencoder()}
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True, **fresh)
    options: dict[str, Any] = {"num_steps": 2, "progress": False}
    drawn = [each.generate(["red"], generator=torch.Generator().manual_seed(1), **options) for each in (module, loaded)]
    assert torch.equal(*drawn)


def test_checkpoint_is_complete_and_keeps_the_averaged_weights(tmp_path: Path) -> None:
    module = tiny_module()
    averaging = EMAWeightAveraging(decay=0.5)
    trainer = Trainer(
        **{**TRAINER, "enable_checkpointing": True}, max_steps=4, callbacks=[averaging], default_root_dir=tmp_path
    )
    trainer.fit(module, loader(4), loader(1))
    trainer.save_checkpoint(tmp_path / "module.ckpt")
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True)
    assert loaded.network.config == NETWORK
    assert loaded.training_config == TRAINING
    captions = ["a red diamond"]
    features = [each.text_encoder.encode(captions) for each in (module, loaded)]
    assert features[0].shape == features[1].shape


def test_checkpoint_of_other_predictions_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(tiny_module())
    trainer.save_checkpoint(tmp_path / "module.ckpt", weights_only=True)
    other = dataclasses.replace(NETWORK, prediction="clean")
    with pytest.raises(ValueError, match=r"trained with prediction velocity \(here clean\)"):
        VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True, network=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": (100.0, 1e4, 1e4)}, r"base \(10000.0, 10000.0, 10000.0\) \(here \(100.0, 10000.0, 10000.0\)\)"),
        ({"policies": ("default", "yarn", "default")}, "policies .*'default'.* .here .*'yarn'"),
        ({"pairing": "half_split"}, r"pairing interleaved \(here half_split\)"),
        ({"axis_dims": (4, 4, 8)}, r"axis_dims None \(here \(4, 4, 8\)\)"),
    ],
)
def test_checkpoint_of_other_positions_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(tiny_module())
    trainer.save_checkpoint(tmp_path / "module.ckpt", weights_only=True)
    other = dataclasses.replace(
        NETWORK, rotary=RotaryGridConfig(**{"original_max_position_embeddings": (4, 2, 2), **changes})
    )
    with pytest.raises(ValueError, match=f"trained with {message}.*load it with the settings it was trained with"):
        VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True, network=other)
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True)
    assert loaded.network.config.rotary == NETWORK.rotary


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"network": dataclasses.replace(NETWORK, channels=4)}, ValueError, r"channels \(4\) must be .* \(3\)"),
        ({"network": dataclasses.replace(NETWORK, text_width=8)}, ValueError, r"text_width \(8\) must be .* \(16\)"),
        (
            {"training": dataclasses.replace(TRAINING, clip_size=(6, 8, 8))},
            ValueError,
            r"original_max_position_embeddings \(4, 2, 2\) must be \(6, 2, 2\), "
            r"the tokens of clips of clip_size \(6, 8, 8\)",
        ),
        (
            {
                "network": dataclasses.replace(
                    NETWORK, patch_size=(2, 4, 4), rotary=RotaryGridConfig(original_max_position_embeddings=(2, 2, 2))
                )
            },
            ValueError,
            r"first_frame_share \(0.5\) needs tokens of one frame",
        ),
        ({"tokenizer": None}, ValueError, "tokenizer must be a file"),
        ({"text_encoder": LengthEncoder()}, ValueError, "tokenizer .* has no use"),
        ({"text_encoder": torch.nn.Identity()}, TypeError, r"text_encoder \(Identity\) must be"),
        ({"autoencoder": torch.nn.Identity()}, TypeError, r"autoencoder \(Identity\) must have"),
        (
            {"text_encoder": dataclasses.replace(TEXT, vocabulary_size=270)},
            ValueError,
            r"vocabulary_size \(270\) must be",
        ),
        ({"network": {"width": 3}}, ValueError, r"network has unknown fields \['width'\]"),
    ],
)
def test_parts_that_do_not_fit_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_module(**changes)


def test_uncompressed_parameters_are_there() -> None:
    module = tiny_module()
    names = [name for name, _ in module.named_parameters()]
    assert all(any(fnmatch(name, pattern) for name in names) for pattern in module.uncompressed_parameters())


def test_sizes_of_the_tower_are_checked() -> None:
    with pytest.raises(ValueError, match=r"depth \(0\) must be at least 1"):
        dataclasses.replace(TEXT, depth=0)
    assert tiny_module().hparams["tokenizer"] == tokenizer_json()
