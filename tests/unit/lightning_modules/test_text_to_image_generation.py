"""Generation through the module: captions to images, primes, guidance and the progress bar."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from tests.unit.lightning_modules.tiny_text_to_image import (
    CAPTIONS,
    TRAINER,
    TRAINING,
    images,
    loader,
    tiny_module,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture(scope="module")
def module() -> TextToImageModule:
    return tiny_module(std=1.0)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


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
    prime = images()
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


def test_guidance_moves_images_and_warns_without_a_trained_empty_caption(module: TextToImageModule) -> None:
    plain = module.generate(CAPTIONS, generator=_generator(), progress=False)
    guided = module.generate(CAPTIONS, generator=_generator(), guidance_scale=4.0, progress=False)
    assert not torch.equal(plain, guided)
    untrained = tiny_module(training=dataclasses.replace(TRAINING, caption_dropout=0.0))
    with pytest.warns(UserWarning, match=r"guidance_scale \(2.0\) has no trained empty caption"):
        untrained.generate(CAPTIONS, guidance_scale=2.0, progress=False)


def test_progress_bar_reaches_its_end_and_can_be_switched_off(
    module: TextToImageModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    module.generate(CAPTIONS, 2, generator=_generator(), prime=images(), prime_rows=3)
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

    Trainer(**TRAINER, callbacks=[Sampler()]).validate(module, loader(1), verbose=False)
    assert "Drawing" not in capsys.readouterr().out
    module.generate(CAPTIONS[:1])
    assert "Drawing" in capsys.readouterr().out


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
        ({"prime": images(), "prime_rows": 0}, r"prime_rows \(0\) must be in 1..3"),
        ({"prime": images(), "prime_rows": 4}, r"prime_rows \(4\) must be in 1..3"),
        ({"prime": images(2)}, "prime has 2 images for 3 captions"),
        ({"prime": images()[:, :, :8, :8]}, r"images \(3, 3, 8, 8\) must have shape"),
    ],
)
def test_bad_arguments_of_generate_are_named(module: TextToImageModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.generate(CAPTIONS, progress=False, **options)


def test_one_string_for_captions_is_refused(module: TextToImageModule) -> None:
    with pytest.raises(TypeError, match="captions .* must be a sequence of strings"):
        module.generate("a red diamond", progress=False)


def test_no_caption_is_refused(module: TextToImageModule) -> None:
    with pytest.raises(ValueError, match="at least one caption"):
        module.generate([], progress=False)
