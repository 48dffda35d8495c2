"""Generation through the video module: captions to clips, sizes, policies, first frames and the progress bar."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_dalle.callbacks.protocols import CandidateGenerator
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.ops.rope import RotaryGridConfig
from tests.unit.lightning_modules.tiny_video_dit import CAPTIONS, NETWORK, TRAINER, TRAINING, clips, loader, tiny_module

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
QUICK: dict[str, Any] = {"num_steps": 3, "progress": False}


@pytest.fixture(scope="module")
def module() -> VideoDiTModule:
    return tiny_module(std=0.3)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_generate_draws_uint8_clips_that_follow_generator_and_caption(module: VideoDiTModule) -> None:
    drawn = module.generate(CAPTIONS, 2, generator=_generator(), **QUICK)
    assert isinstance(module, CandidateGenerator)
    assert drawn.dtype == torch.uint8
    assert drawn.shape == (3, 2, 3, 4, 8, 8)
    assert torch.equal(drawn, module.generate(CAPTIONS, 2, generator=_generator(), **QUICK))
    assert not torch.equal(drawn, module.generate(CAPTIONS, 2, generator=torch.Generator().manual_seed(8), **QUICK))
    # A value in the middle between two may be rounded otherwise in another batch.
    alone = module.generate(CAPTIONS[1:2], 1, generator=_generator(), max_batch=1, **QUICK)
    assert (alone[0, 0].int() - drawn[1, 0].int()).abs().max() <= 1
    assert not torch.equal(drawn[0, 0], drawn[0, 1])


def test_equal_captions_of_a_batch_get_noise_of_their_own(module: VideoDiTModule) -> None:
    drawn = module.generate([CAPTIONS[0]] * 2, generator=_generator(), **QUICK)
    assert not torch.equal(drawn[0], drawn[1])


def test_generate_leaves_modes_and_the_global_stream_alone(module: VideoDiTModule) -> None:
    state = torch.get_rng_state()
    module.generate(CAPTIONS, generator=_generator(), **QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training


def test_larger_and_longer_clips_need_policies_that_change_them(module: VideoDiTModule) -> None:
    size: dict[str, Any] = {"num_frames": 8, "width": 16, "generator": _generator(), **QUICK}
    with pytest.raises(
        ValueError, match="time has 8 tokens, more than the 4 of original_max_position_embeddings; choose policies"
    ):
        module.generate(CAPTIONS[:1], **size)
    drawn = [
        module.generate(CAPTIONS[:1], policies=policies, **{**size, "generator": _generator()})
        for policies in (("default",) * 3, ("riflex", "default", "ntk_aware"))
    ]
    assert drawn[0].shape == (1, 1, 3, 8, 8, 16)
    assert not torch.equal(*drawn)
    assert module.generate(CAPTIONS[:1], num_frames=1, height=4, **QUICK).shape == (1, 1, 3, 1, 4, 8)


def test_guidance_and_solver_change_clips(module: VideoDiTModule) -> None:
    options: list[dict[str, Any]] = [{}, {"guidance_scale": 3.0}, {"solver": "heun"}]
    drawn = [module.generate(CAPTIONS, generator=_generator(), **QUICK, **option) for option in options]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_first_frame_stays_and_the_rest_follows_it(module: VideoDiTModule) -> None:
    pictures = clips()[:, :, 0]
    drawn = module.generate(CAPTIONS, 2, first_frame=pictures, generator=_generator(), guidance_scale=2.0, **QUICK)
    assert torch.equal(drawn[:, 0, :, 0], pictures)
    assert torch.equal(drawn[:, 1, :, 0], pictures)
    other = module.generate(
        CAPTIONS, 2, first_frame=255 - pictures, generator=_generator(), guidance_scale=2.0, **QUICK
    )
    assert not torch.equal(drawn[:, :, :, 1:], other[:, :, :, 1:])


def test_options_that_training_did_not_prepare_warn() -> None:
    training = dataclasses.replace(TRAINING, caption_dropout=0.0, first_frame_share=0.0)
    untrained = tiny_module(training=training)
    with pytest.warns(UserWarning, match=r"guidance_scale \(2.0\) has no trained empty caption"):
        untrained.generate(CAPTIONS, guidance_scale=2.0, **QUICK)
    with pytest.warns(UserWarning, match="first_frame was never shown in training"):
        untrained.generate(CAPTIONS, first_frame=clips()[:, :, 0], **QUICK)


def test_trainer_predicts_a_clip_for_each_caption() -> None:
    module = tiny_module()
    predicted = Trainer(**TRAINER).predict(module, loader(2))
    assert predicted is not None
    assert [batch.shape for batch in predicted] == [(2, 1, 3, 4, 8, 8)] * 2


def test_progress_bar_reaches_its_end_and_can_be_switched_off(
    module: VideoDiTModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    module.generate(CAPTIONS, 2, num_steps=3, max_batch=4)
    output = capsys.readouterr().out
    assert "18/18" in output
    assert "Drawing clips" in output
    module.generate(CAPTIONS, 2, num_steps=3, progress=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_candidates": 0}, r"num_candidates \(0\) must be at least 1"),
        ({"max_batch": 0}, r"max_batch \(0\) must be at least 1"),
        ({"num_steps": 0}, r"num_steps \(0\) must be at least 1"),
        ({"solver": "rk4"}, r"solver \('rk4'\) must be one of"),
        ({"guidance_scale": -1.0}, r"guidance_scale \(-1.0\) must be finite and at least 0"),
        ({"height": 6}, r"height \(6\) must be a positive multiple of the patch's 4"),
        ({"num_frames": 0}, r"frames \(0\), height \(8\) and width \(8\) must each be at least 1"),
        ({"policies": ("default",)}, "policies .* must be three"),
        ({"first_frame": clips(2)[:, :, 0]}, r"first_frame has shape \(2, 3, 8, 8\); give one picture for each of 3"),
        ({"first_frame": clips(3)[:, :, 0, :4]}, r"first_frame has shape \(3, 3, 4, 8\)"),
    ],
)
def test_bad_arguments_of_generate_are_named(module: VideoDiTModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.generate(CAPTIONS, **{**QUICK, **options})


def test_first_frame_needs_tokens_of_one_frame() -> None:
    network = dataclasses.replace(
        NETWORK, patch_size=(2, 4, 4), rotary=RotaryGridConfig(original_max_position_embeddings=(2, 2, 2))
    )
    coarse = tiny_module(network=network, training=dataclasses.replace(TRAINING, first_frame_share=0.0))
    with pytest.raises(ValueError, match="first_frame needs tokens of one frame, but patch_size is"):
        coarse.generate(CAPTIONS, first_frame=clips()[:, :, 0], **QUICK)


def test_captions_must_be_several_strings(module: VideoDiTModule) -> None:
    with pytest.raises(TypeError, match="captions .* must be a sequence of strings"):
        module.generate("a red diamond", **QUICK)
    with pytest.raises(ValueError, match=r"captions \(0\) must be at least 1"):
        module.generate([], **QUICK)
