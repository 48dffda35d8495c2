"""The precision plugin inside a Trainer."""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn

from lightning_dalle.ops import hardware
from lightning_dalle.plugins import PerBlockGradientScaling, per_block_gradient_scaling
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.unit.plugins.residual_network import TRAINER, Body, ResidualModule, batches, module

pytestmark = LIGHTNING_WARNINGS


class Injection(Callback):
    """Spoils the gradient of one block at some optimizer steps, as an overflow would."""

    def __init__(self, events: dict[int, int]) -> None:
        self.events = events
        self.scales: list[dict[str, float]] = []
        self.weights: list[Tensor] = []
        self.norms: list[float] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        block = self.events.get(trainer.global_step)
        if block is not None:
            pl_module.network.bodies[block].fc1.weight.grad[0, 0] = math.nan

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in pl_module.parameters() if parameter.grad is not None]
        self.norms.append(torch.stack(norms).norm().item() if norms else 0.0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        self.scales.append(plugin.loss_scales())
        self.weights.append(pl_module.network.head.weight.detach().clone())


def fit(
    model: LightningModule, plugin: PerBlockGradientScaling, steps: int, *callbacks: Callback, **options: Any
) -> Trainer:
    trainer = Trainer(**{**TRAINER, "max_steps": steps, "plugins": plugin, "callbacks": list(callbacks), **options})
    trainer.fit(model, batches(options.get("accumulate_grad_batches", 1) * steps))
    return trainer


def test_an_update_with_a_non_finite_gradient_is_skipped_and_moves_one_scale() -> None:
    plugin, injection = PerBlockGradientScaling(dtype="bfloat16"), Injection({2: 1})
    fit(module(), plugin, 4, injection)
    growth = 2 ** (1 / 1000)
    trace = [scales["body_1"] / 2**13 for scales in injection.scales]
    assert trace == pytest.approx([growth, growth**2, growth**2 / math.sqrt(2), growth**3 / math.sqrt(2)])
    others = [scales["body_0"] / 2**13 for scales in injection.scales]
    assert others == pytest.approx([growth**step for step in (1, 2, 3, 4)])
    moved = [not torch.equal(*pair) for pair in zip(injection.weights, injection.weights[1:], strict=False)]
    assert moved == [True, False, True]
    assert (plugin.num_updates, plugin.num_skipped_updates) == (4, 1)


def test_a_non_finite_gradient_outside_of_blocks_skips_and_moves_no_scale_down() -> None:
    class SpoilHead(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.network.head.bias.grad[0] = math.inf

    plugin = PerBlockGradientScaling()
    model = module()
    before = copy.deepcopy(model.state_dict())
    fit(model, plugin, 2, SpoilHead())
    assert plugin.num_skipped_updates == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert plugin.scales.num_divisions == {"body_0": 0, "body_1": 0, "body_2": 0}


def test_float32_blocks_train_exactly_as_without_the_plugin() -> None:
    plain, scaled = module(), module()
    Trainer(**{**TRAINER, "max_steps": 5}).fit(plain, batches(5))
    # Powers of two round nothing.
    fit(scaled, PerBlockGradientScaling(dtype="float32", growth_factor=1.0), 5)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), scaled.parameters(), strict=True))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_sees_unscaled_gradients(algorithm: str) -> None:
    clipped: list[Tensor] = []

    class Look(ResidualModule):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            before = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            clipped.extend([before, torch.cat([parameter.grad.flatten() for parameter in self.parameters()])])

    torch.manual_seed(0)
    bound = 0.05
    fit(Look(), PerBlockGradientScaling(), 1, gradient_clip_val=bound, gradient_clip_algorithm=algorithm)
    before, after = clipped
    if algorithm == "norm":
        assert before.norm() > bound
        torch.testing.assert_close(after, before * bound / before.norm())
    else:
        assert torch.equal(after, before.clamp(-bound, bound))
        assert before.abs().max() > bound


def test_an_accumulation_has_one_scale_and_the_gradient_of_the_whole_batch() -> None:
    accumulated, whole = module(learning_rate=0.1), module(learning_rate=0.1)
    plugin, injection = PerBlockGradientScaling(), Injection({})
    fit(accumulated, plugin, 1, injection, accumulate_grad_batches=4)
    trainer = Trainer(**{**TRAINER, "max_steps": 1, "plugins": PerBlockGradientScaling()})
    trainer.fit(whole, batches(1, size=32))
    assert plugin.num_updates == 1
    assert [scales["body_0"] for scales in injection.scales[:3]] == [2**13] * 3
    for one, other in zip(accumulated.parameters(), whole.parameters(), strict=True):
        # The float16 rounding of gradients, times the learning rate.
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 * 0.1)


class Manual(ResidualModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_equals_automatic() -> None:
    torch.manual_seed(0)
    manual, automatic = Manual(), module()
    injections = Injection({1: 0}), Injection({1: 0})
    plugins = PerBlockGradientScaling(), PerBlockGradientScaling()
    fit(manual, plugins[0], 3, injections[0])
    fit(automatic, plugins[1], 3, injections[1])
    assert plugins[0].state_dict() == plugins[1].state_dict()
    assert plugins[0].num_skipped_updates == 1
    assert all(torch.equal(one, other) for one, other in zip(manual.parameters(), automatic.parameters(), strict=True))


def test_two_optimizers_decide_for_their_own_blocks() -> None:
    class TwoOptimizers(Manual):
        def configure_optimizers(self) -> Any:
            first = list(self.network.bodies[0].parameters())
            rest = [parameter for name, parameter in self.named_parameters() if "bodies.0" not in name]
            return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(rest, lr=0.1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            self.manual_backward(ResidualModule.training_step(self, batch, batch_idx))
            self.network.bodies[0].fc1.weight.grad[0, 0] = math.nan
            for optimizer in optimizers:
                optimizer.step()

    torch.manual_seed(0)
    model, plugin = TwoOptimizers(), PerBlockGradientScaling()
    before = copy.deepcopy(model.state_dict())
    fit(model, plugin, 1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not any("bodies.0" in name for name in changed)
    assert "network.head.weight" in changed
    assert plugin.scales.num_divisions == {"body_0": 1, "body_1": 0, "body_2": 0}
    assert plugin.scales.num_growths == {"body_0": 0, "body_1": 1, "body_2": 1}


def test_a_training_step_without_loss_is_no_update() -> None:
    class Silent(ResidualModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    plugin = PerBlockGradientScaling()
    with pytest.warns(UserWarning, match="training_step` returned `None`"):
        fit(Silent(), plugin, 2)
    assert plugin.num_updates == 1


def test_blocks_may_be_named_by_class_for_a_module_that_knows_nothing() -> None:
    class Foreign(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = ResidualModule().network

        training_step: Callable[..., Any] = ResidualModule.training_step
        losses: list[float] = []  # noqa: RUF012
        learning_rate = 0.01
        configure_optimizers: Callable[..., Any] = ResidualModule.configure_optimizers

    plugin = PerBlockGradientScaling(blocks=Body)
    fit(Foreign(), plugin, 2)
    assert list(plugin.loss_scales()) == ["network.bodies.0", "network.bodies.1", "network.bodies.2"]
    assert plugin.num_updates == 2


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_brings_back_the_scales(tmp_path: Path) -> None:
    whole, first, second = (PerBlockGradientScaling() for _ in range(3))
    events = {2: 1, 4: 0}
    unbroken = module()
    fit(unbroken, whole, 6, Injection(events))
    trainer = fit(module(), first, 3, Injection(events))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = module(seed=5)
    continued = Trainer(**{**TRAINER, "max_steps": 6, "plugins": second, "callbacks": [Injection(events)]})
    continued.fit(resumed, batches(6), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert second.state_dict() == whole.state_dict()
    assert whole.num_skipped_updates == 2


def test_the_module_is_left_as_it_was_and_scales_go_on_in_the_next_fit() -> None:
    model, plugin = module(), PerBlockGradientScaling()
    fit(model, plugin, 2)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    fit(model, plugin, 2)
    assert plugin.num_updates == 4
    assert plugin.loss_scales()["body_0"] == pytest.approx(2**13 * 2 ** (4 / 1000))


def test_precision_is_told_as_lightning_names_it() -> None:
    plugin = PerBlockGradientScaling()
    assert Trainer(**TRAINER, plugins=plugin).precision == "16-mixed"
    plugin.use_dtype("bfloat16")
    assert plugin.precision == "bf16-mixed"


def test_lbfgs_is_refused() -> None:
    class Quasi(ResidualModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TypeError, match="LBFGS evaluates the closure many times a step"):
        fit(Quasi(), PerBlockGradientScaling(), 1)


class WithoutEngine(DeepSpeedStrategy):
    """DeepSpeed's strategy where its package need not be installed, on one process."""

    def __init__(self) -> None:
        DDPStrategy.__init__(self)
        self._config_initialized = True

    def _configure_launcher(self) -> None:
        """No other process to start."""

    def setup_environment(self) -> None:
        """No other process to wait for."""


def test_deepspeed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot scale gradients that DeepSpeed's engine computes.*'ddp' or"):
        fit(module(), PerBlockGradientScaling(), 1, strategy=WithoutEngine())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, r"dtype \('float8'\) must be one of float16, bfloat16, float32"),
        ({"initial_scale": 1.0}, r"initial_scale \(1.0\)"),
    ],
)
def test_wrong_settings_are_refused_before_a_run(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerBlockGradientScaling(**options)


def test_modules_of_this_suite_name_two_blocks_a_layer() -> None:
    from tests.unit.lightning_modules.tiny_text_to_image import tiny_module

    model = tiny_module()
    blocks = model.gradient_blocks()
    assert len(blocks) == 2 * len(model.network.layers)
    inside = {
        parameter for parts in blocks.values() for part in parts for parameter in nn.ModuleList(parts).parameters()
    }
    assert inside == set(model.network.layers.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dtype_that_the_cpu_multiplies_slowly_is_used_with_a_warning(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: False)
    plugin = PerBlockGradientScaling(dtype=dtype)
    with pytest.warns(UserWarning, match=f"^{dtype} is much slower.*dtype='float32'"):
        fit(module(), plugin, 1)
    assert plugin.dtype == getattr(torch, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*much slower")
        fit(module(), PerBlockGradientScaling(dtype="float32"), 1)


def test_what_counts_is_the_device_that_the_trainer_moves_the_module_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        per_block_gradient_scaling, "warn_if_slow", lambda dtype, device: asked.append(torch.device(device).type)
    )
    model = module()
    trainer = Trainer(**TRAINER)
    trainer.strategy._root_device = torch.device("meta")  # type: ignore[attr-defined]
    model.trainer = trainer
    PerBlockGradientScaling().convert_module(model)
    PerBlockGradientScaling().convert_module(module())
    assert asked == ["meta", "cpu"]
