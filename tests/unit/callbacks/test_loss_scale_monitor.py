"""The monitor of loss scales, under one scale per block and under one for all."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_dalle.callbacks import LossScaleMonitor
from lightning_dalle.plugins import PerBlockGradientScaling
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.unit.plugins.residual_network import TRAINER, ResidualModule, batches, module

pytestmark = LIGHTNING_WARNINGS
PLUGINS = pytest.mark.parametrize("per_block", [True, False], ids=["per block", "global"])


def plugin(per_block: bool) -> Any:
    if per_block:
        return PerBlockGradientScaling()
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def fit(model: LightningModule, precision: Any, monitor: LossScaleMonitor, steps: int, **options: Any) -> Trainer:
    trainer = Trainer(**{**TRAINER, "max_steps": steps, "plugins": precision, "callbacks": [monitor], **options})
    trainer.fit(model, batches(steps * options.get("accumulate_grad_batches", 1)))
    return trainer


@PLUGINS
def test_figures_are_those_of_the_gradients(per_block: bool) -> None:
    seen: dict[str, list[Tensor]] = {}

    class Look(ResidualModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen["gradients"] = [parameter.grad.clone() for parameter in self.network.bodies[1].parameters()]
            seen["before"] = [parameter.detach().clone() for parameter in self.parameters()]

    torch.manual_seed(0)
    model, monitor = Look(learning_rate=0.5), LossScaleMonitor(every_n_updates=1)
    outputs: list[Tensor] = []
    torch.nn.init.constant_(model.network.bodies[1].fc2.bias, -5.0)
    model.network.bodies[1].register_forward_hook(lambda _, args, output: outputs.append(output))
    fit(model, plugin(per_block), monitor, 1)
    metrics = monitor.metrics
    assert metrics["precision/skipped_share"] == 0
    before, after = (torch.cat([part.flatten() for part in parts]) for parts in (seen["before"], model.parameters()))
    ratio = ((after - before).norm() / before.norm()).item()
    if per_block:
        gradients = torch.cat([gradient.flatten() for gradient in seen["gradients"]])
        assert metrics["precision/scale/body_1"] == pytest.approx(2**13 * 2 ** (1 / 1000))
        assert metrics["precision/gradient_norm/body_1"] == pytest.approx(gradients.norm().item(), rel=1e-5)
        assert metrics["precision/largest_gradient/body_1"] == pytest.approx(gradients.abs().max().item())
        assert metrics["precision/zero_gradients/body_1"] == pytest.approx((gradients == 0).float().mean().item())
        assert metrics["precision/growths/body_1"] == 1
        assert metrics["precision/largest_activation/body_1"] == pytest.approx(-outputs[0].min().item())
        assert "precision/update_ratio/outside" in metrics
    else:
        assert metrics["precision/scale/module"] == 1024
        assert metrics["precision/update_ratio/module"] == pytest.approx(ratio, rel=1e-4)


class SpoiltForward(ResidualModule):
    """The second body puts out infinity, at one batch only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.network.bodies[1].gain = math.inf if batch_idx == 2 else 1.0
        self.log("train/loss", 0.0, prog_bar=True)
        return super().training_step(batch, batch_idx)


class SpoiltBackward(ResidualModule):
    """The gradient of one layer's output overflows float16, at one batch only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.network.bodies[1].gain = 1e6 if batch_idx == 2 else 1.0
        with torch.no_grad():
            self.network.bodies[1].fc2.weight.fill_(0.0 if batch_idx == 2 else 0.1)
            self.network.bodies[1].fc2.bias.zero_()
        return super().training_step(batch, batch_idx)


@PLUGINS
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (SpoiltForward, "the forward pass of network.bodies.1 in float"),
        (SpoiltBackward, "the backward pass of network.bodies.1.fc2 in float16"),
    ],
)
def test_the_planted_module_is_named(
    per_block: bool, kind: type[ResidualModule], expected: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    monitor = LossScaleMonitor(dump_folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        trainer = fit(kind(), plugin(per_block), monitor, 5)
    (message,) = [record.getMessage() for record in caplog.records if "first turned" in record.getMessage()]
    assert message.startswith("update 3 is skipped: batch 2 on rank 0 first turned non-finite in " + expected)
    assert (monitor.num_updates, monitor.num_skipped_updates) == (5, 1)
    dumped = torch.load(tmp_path / "non_finite-update_3-rank_0.pt", weights_only=True)
    assert dumped["batch_idx"] == 2
    assert torch.equal(dumped["batch"][0], list(batches(5))[2][0])
    assert trainer.global_step == 5


def test_a_batch_that_is_not_finite_is_named() -> None:
    monitor = LossScaleMonitor()
    data = torch.utils.data.TensorDataset(torch.full((4, 4), math.nan), torch.zeros(4, 2))
    trainer = Trainer(**{**TRAINER, "max_steps": 1, "plugins": plugin(True), "callbacks": [monitor]})
    trainer.fit(module(), torch.utils.data.DataLoader(data, batch_size=4))
    assert str(monitor.first_non_finite) == "the batch in float32"


def test_the_bad_batch_of_an_accumulation_is_found() -> None:
    torch.manual_seed(0)
    monitor = LossScaleMonitor()
    fit(SpoiltForward(), plugin(True), monitor, 2, accumulate_grad_batches=4)
    assert monitor.first_non_finite is not None
    assert monitor.first_non_finite.module == "network.bodies.1"
    assert monitor.num_updates == 2


def test_a_second_run_of_the_step_leaves_no_trace() -> None:
    class Noisy(SpoiltForward):
        def __init__(self) -> None:
            super().__init__()
            self.network.embed = nn.Sequential(self.network.embed, nn.Dropout(0.3), nn.BatchNorm1d(8))

    results = []
    for callbacks in ([], [LossScaleMonitor()]):
        torch.manual_seed(0)
        model = Noisy()
        settings = {**TRAINER, "max_steps": 5, "plugins": plugin(True), "callbacks": callbacks}
        Trainer(**settings).fit(model, batches(5))
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items() if value.isfinite().all())
    assert results[0]["network.embed.2.num_batches_tracked"] == 5 == results[1]["network.embed.2.num_batches_tracked"]


class AlwaysSpoilt(ResidualModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 1e9


@PLUGINS
def test_too_many_skips_end_the_training(per_block: bool) -> None:
    torch.manual_seed(0)
    monitor = LossScaleMonitor(max_skips_in_a_row=3)
    trainer = fit(AlwaysSpoilt(), plugin(per_block), monitor, 20, min_epochs=0)
    assert monitor.num_updates == trainer.global_step == 3


@PLUGINS
def test_too_many_skips_may_lead_to_bfloat16(per_block: bool) -> None:
    torch.manual_seed(0)
    monitor, precision = LossScaleMonitor(max_skips_in_a_row=3, then="bfloat16"), plugin(per_block)
    fit(AlwaysSpoilt(learning_rate=0.0), precision, monitor, 6)
    assert precision.precision == "bf16-mixed"
    # bfloat16 has the range for it.
    assert (monitor.num_updates, monitor.num_skipped_updates) == (6, 3)


def test_off_its_turn_it_adds_no_hooks_and_logs_nothing(tmp_path: Path) -> None:
    hooks = []

    class Count(ResidualModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            hooks.append(sum(len(part._forward_hooks) for part in self.modules()))
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    logger = CSVLogger(tmp_path)
    fit(Count(), plugin(True), LossScaleMonitor(every_n_updates=3), 6, logger=logger, log_every_n_steps=1)
    assert [count - hooks[1] for count in hooks] == [3, 0, 0, 3, 0, 0]
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert len(list((Path(logger.log_dir) / "images").glob("precision-scales-6.png"))) == 1


def test_heat_map_is_a_picture_of_all_turns() -> None:
    monitor = LossScaleMonitor(every_n_updates=1)
    with pytest.raises(RuntimeError, match="the monitor has seen no update yet; fit with it as a callback first"):
        monitor.heat_map()
    fit(module(), plugin(True), monitor, 3)
    picture = monitor.heat_map()
    assert (picture.dtype, picture.shape[0]) == (torch.uint8, 3)
    assert len(picture.flatten(1).unique(dim=1)[0]) > 2


@PLUGINS
def test_skips_and_changes_are_counted_and_counts_are_in_the_checkpoint(per_block: bool) -> None:
    monitor, again = LossScaleMonitor(every_n_updates=1), LossScaleMonitor()
    torch.manual_seed(0)
    fit(SpoiltForward(), plugin(per_block), monitor, 4)
    assert monitor.metrics["precision/skipped_share"] == 1 / 4
    block = "body_1" if per_block else "module"
    assert monitor.metrics[f"precision/divisions/{block}"] == 1
    again.load_state_dict(monitor.state_dict())
    assert (again.num_updates, again.num_skipped_updates) == (4, 1)
    # The first skipped update of the whole run was looked into.
    fit(SpoiltForward(), plugin(per_block), again, 4)
    assert (again.num_skipped_updates, again.first_non_finite) == (2, None)


def test_what_only_the_scale_makes_infinite_is_found() -> None:
    torch.manual_seed(0)
    monitor = LossScaleMonitor()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))
    fit(ResidualModule(), precision, monitor, 1)
    assert monitor.first_non_finite is not None
    assert monitor.first_non_finite.direction == "backward"


def test_the_second_run_of_a_step_draws_the_same_numbers() -> None:
    class Drawing(SpoiltForward):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    drawn: list[float] = []
    torch.manual_seed(0)
    fit(Drawing(), plugin(True), LossScaleMonitor(), 4)
    assert len(drawn) == 5
    assert drawn[3] == drawn[2]
    assert len(set(drawn)) == 4


def test_skips_with_updates_between_them_are_borne() -> None:
    class SpoiltNowAndThen(ResidualModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1.0, 1e9)[batch_idx % 2]

    torch.manual_seed(0)
    monitor = LossScaleMonitor(max_skips_in_a_row=2)
    fit(SpoiltNowAndThen(), plugin(True), monitor, 6)
    assert (monitor.num_updates, monitor.num_skipped_updates) == (6, 3)


def test_manual_optimization_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    class Manual(ResidualModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.runs = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.runs += 1
            self.manual_backward(super().training_step(batch, batch_idx) * math.inf)
            optimizer.step()

    torch.manual_seed(0)
    model = Manual()
    with caplog.at_level(logging.WARNING):
        fit(model, plugin(True), LossScaleMonitor(), 1)
    assert model.runs == 1
    assert "update 1 is skipped; manual optimization is not run again" in caplog.messages


def test_a_run_without_loss_scale_is_refused() -> None:
    with pytest.raises(TypeError, match=r"found no loss scale in Precision \(32-true\); use Trainer\(plugins="):
        fit(module(), None, LossScaleMonitor(), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_updates": 0}, r"every_n_updates \(0\) must be at least 1"),
        ({"max_skips_in_a_row": 0}, r"max_skips_in_a_row \(0\) must be at least 1"),
        ({"then": "panic"}, r"then \('panic'\) must be 'stop' or 'bfloat16'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaleMonitor(**options)
