import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_dalle.callbacks import CLIPReranking, ImageGenerationMetrics
from tests.foreign_module import LIGHTNING_WARNINGS, QUIET, Brightness, MeanColour, Painter, fit, painted_loader

pytestmark = LIGHTNING_WARNINGS


def _reranking(**options: Any) -> CLIPReranking:
    return CLIPReranking(["dark", "light"], Brightness(), num_candidates=3, keep=2, **options)


class _Watch(Callback):
    """Notes random states and modes before and after the callback under test."""

    def __init__(self) -> None:
        self.states: list[tuple[Any, ...]] = []

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            modes = [part.training for part in pl_module.modules()]
            generators = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
            self.states.append((*generators, modes, torch.is_inference_mode_enabled()))


def test_turns_come_every_n_validations_and_never_in_the_sanity_check() -> None:
    painter, callback = Painter(), _reranking(every_n_validations=2)
    fit(painter, [callback], max_epochs=5, num_sanity_val_steps=2)
    assert len(painter.calls) == 2


def test_steps_between_validations_make_turns_too() -> None:
    painter, callback = Painter(), _reranking(every_n_validations=2)
    fit(painter, [callback], max_epochs=2, val_check_interval=1)
    assert len(painter.calls) == 3


def test_callbacks_do_nothing_off_their_turn() -> None:
    painter, scorer = Painter(), Brightness()
    reranking = CLIPReranking(["dark"], scorer, num_candidates=2, keep=1, every_n_validations=2)
    metrics = ImageGenerationMetrics(MeanColour(), num_images=2, every_n_validations=2)
    seen: list[int] = []
    metrics.extractor.register_forward_hook(lambda *_: seen.append(1))
    metrics.extractor.network.register_forward_hook(lambda *_: seen.append(1))
    trainer = fit(painter, [reranking, metrics], max_epochs=1)
    assert (painter.calls, scorer.captions, seen) == ([], [], [])
    assert reranking.result is None
    assert metrics.scores == {}
    assert not any("rerank" in name or "fd" in name for name in trainer.callback_metrics)


def test_validation_and_test_runs_are_always_a_turn() -> None:
    painter, callback = Painter(), _reranking(every_n_validations=10)
    trainer = Trainer(**QUIET, callbacks=[callback])
    trainer.validate(painter, painted_loader(), verbose=False)
    trainer.test(painter, painted_loader(), verbose=False)
    assert len(painter.calls) == 2
    assert "test/reranking_best_score" in trainer.callback_metrics


def test_resumed_run_keeps_the_turns() -> None:
    first = _reranking(every_n_validations=2)
    fit(Painter(), [first], max_epochs=3)
    painter, second = Painter(), _reranking(every_n_validations=2)
    second.load_state_dict(first.state_dict())
    fit(painter, [second], max_epochs=1)
    assert len(painter.calls) == 1


def test_modes_and_random_states_are_put_back(tmp_path: Any) -> None:
    before, after = _Watch(), _Watch()
    painter = Painter()
    metrics = ImageGenerationMetrics(MeanColour(), num_images=4, cache_folder=tmp_path)
    fit(painter, [before, _reranking(), metrics, after], max_epochs=2)
    assert len(painter.calls) == 4
    assert before.states == after.states
    assert painter.dropout.training
    assert not painter.frozen.training


def test_training_is_the_same_with_and_without_the_callback() -> None:
    levels = []
    for callbacks in ([], [_reranking()]):
        torch.manual_seed(0)
        painter = Painter()
        fit(painter, callbacks, max_epochs=3)
        levels.append(painter.level.item())
    assert levels[0] == levels[1]


def test_images_are_the_same_at_each_turn_of_an_unchanged_model() -> None:
    painter, callback = Painter(learning_rate=0.0), _reranking()
    results = []
    for _ in range(2):
        fit(painter, [callback])
        assert callback.result is not None
        results.append(callback.result.images)
    assert torch.equal(*results)
    other = _reranking(seed=1)
    fit(painter, [other])
    assert other.result is not None
    assert not torch.equal(other.result.images, results[0])


@pytest.mark.parametrize("averaging_first", [True, False])
def test_averaged_weights_are_used_and_training_goes_on_with_its_own(averaging_first: bool) -> None:
    averaging, callback = EMAWeightAveraging(decay=0.5), _reranking()
    callbacks = [averaging, callback] if averaging_first else [callback, averaging]

    class _Levels(Callback):
        def __init__(self) -> None:
            self.averaged: list[float] = []
            self.own: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.own.append(pl_module.level.item())

        def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                self.averaged.append(averaging._average_model.module.level.item())

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                assert pl_module.level.item() == self.own[-1]

    levels = _Levels()
    painter = Painter()
    # First, so that it looks at the averaged model before anything is swapped.
    fit(painter, [levels, *callbacks], max_epochs=2)
    assert [call["level"] for call in painter.calls] == levels.averaged
    assert levels.averaged[0] not in levels.own


def test_options_reach_generate() -> None:
    painter, callback = Painter(), _reranking(generate_options={"contrast": 0.0})
    fit(painter, [callback])
    assert callback.result is not None
    assert [images.unique().numel() for images in callback.result.images] == [1, 1]


def test_results_can_be_used_in_training() -> None:
    callback = _reranking()
    fit(Painter(), [callback])
    assert callback.result is not None
    weight = torch.ones(1, requires_grad=True)
    (callback.result.images * weight).sum().backward()
    callback.result.scores.add_(1)
    assert weight.grad is not None


def test_model_that_cannot_generate_is_refused() -> None:
    class Silent(LightningModule):
        pass

    with pytest.raises(TypeError, match="CLIPReranking needs a LightningModule with generate.* and Silent has none"):
        _reranking().setup(Trainer(**QUIET), Silent(), "fit")


@pytest.mark.parametrize("returned", [torch.zeros(2, 3, 3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
def test_images_of_another_kind_are_refused(returned: Tensor) -> None:
    class Odd(Painter):
        def generate(self, *_: Any, **__: Any) -> Tensor:
            return returned

    with pytest.raises(TypeError, match="generate of Odd returned torch.* it must be uint8 .captions .2., num_cand"):
        fit(Odd(), [_reranking()])


def test_turns_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"every_n_validations \(0\) must be at least 1"):
        _reranking(every_n_validations=0)


def test_precision_of_the_trainer_holds_in_generate() -> None:
    class Noting(Painter):
        def generate(self, *arguments: Any, **options: Any) -> Tensor:
            self.autocast = torch.is_autocast_enabled("cpu")
            return super().generate(*arguments, **options)

    painter = Noting()
    fit(painter, [_reranking()], precision="bf16-mixed")
    assert painter.autocast
