"""Optimizer, weight decay and learning rate of every module."""

import dataclasses
import math
from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_dalle.lightning_modules.configuration import as_config
from lightning_dalle.lightning_modules.contrastive_module import ContrastiveTrainingConfig
from lightning_dalle.lightning_modules.optimization import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimization,
    build_optimizer,
    build_schedulers,
    learning_rate_factor,
)
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTrainingConfig
from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from tests.ranks import run_ranks

TINY = SparseTransformerConfig(
    depth=2,
    num_heads=2,
    head_dim=4,
    text_tokens=6,
    text_vocabulary_size=11,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=9,
)

PAPER = TextToImageTrainingConfig()


def test_defaults_are_the_paper_s() -> None:
    training = TextToImageTrainingConfig()
    assert training.optimizer == OptimizerConfig(
        name="adamw", learning_rate=4.5e-4, beta1=0.9, beta2=0.96, epsilon=1e-8, weight_decay=4.5e-2
    )
    assert training.schedule == ScheduleConfig(name="plateau", warmup_steps=5000, plateau_halvings=5)
    assert training.text_loss_weight == 1 / 8
    assert training.caption_dropout == 0


def test_paper_s_recipe_writes_the_defaults_out() -> None:
    recipe = yaml.safe_load((files("lightning_dalle") / "recipes/paper/text_to_image.yaml").read_text())
    parts = recipe["model"]["init_args"]
    training = as_config(TextToImageTrainingConfig, parts["training"], "training")
    assert training == TextToImageTrainingConfig()
    assert OptimizerConfig(**parts["training"]["optimizer"]) == training.optimizer
    network = SparseTransformerConfig(**parts["network"])
    assert network == dataclasses.replace(SparseTransformerConfig(), activation_checkpointing=True)
    assert set(parts["network"]) == {field.name for field in dataclasses.fields(SparseTransformerConfig)}


def test_weight_decay_spares_gains_biases_and_embeddings() -> None:
    network = SparseTransformer(TINY)
    decayed, spared = build_optimizer(network, PAPER.optimizer).param_groups
    names = {parameter: name for name, parameter in network.named_parameters()}
    assert {names[p] for p in decayed["params"]} == {
        f"{module}.weight" for module, kind in network.named_modules() if isinstance(kind, torch.nn.Linear)
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (4.5e-2, 0.0)


def test_16_bit_moments_are_those_of_the_matrices_in_the_layers() -> None:
    network = SparseTransformer(dataclasses.replace(TINY, num_heads=8, head_dim=8, text_vocabulary_size=200))
    optimizer = build_optimizer(network, dataclasses.replace(PAPER.optimizer, moments="16bit"))
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    packed = {
        name for name, value in network.named_parameters() if optimizer.state[value]["exp_avg"].dtype == torch.int16
    }
    layers = {name for name, value in network.named_parameters() if name.startswith("layers.") and value.ndim == 2}
    assert packed == layers
    plain = build_optimizer(network, PAPER.optimizer)
    ours, theirs = optimizer.param_groups, plain.param_groups
    assert [group["params"] for group in ours] == [group["params"] for group in theirs]
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert [group[key] for group in ours] == [group[key] for group in theirs]


def test_muon_takes_the_matrices_in_the_layers_and_adamw_the_rest() -> None:
    network = SparseTransformer(TINY)
    optimizer = build_optimizer(network, dataclasses.replace(PAPER.optimizer, name="muon", learning_rate=0.01))
    layers = {parameter for parameter in network.layers.parameters() if parameter.ndim == 2}
    inner, heads, spared = (group["params"] for group in optimizer.param_groups)
    assert set(inner) == layers
    assert set(heads) == {network.text_head.weight, network.image_head.weight}
    assert len(inner) + len(heads) + len(spared) == len(list(network.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [4.5e-2, 4.5e-2, 0.0]
    before = {parameter: parameter.detach().clone() for parameter in layers}
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter, old in before.items():
        step = (parameter.detach() - old * (1 - 0.01 * 4.5e-2)).square().mean().sqrt()
        # As large as AdamW's usually are, whatever the shape; Newton-Schulz leaves singular values of .7 to 1.2.
        assert 0.2 * 0.01 * 0.6 < step < 0.2 * 0.01 * 1.3


def build_muon_of_shards(rank: int) -> str:
    network = SparseTransformer(TINY)
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    try:
        build_optimizer(network, OptimizerConfig(name="muon"))
    except ValueError as error:
        return str(error)
    return ""


def test_muon_refuses_sharded_matrices() -> None:
    (message,) = run_ranks(build_muon_of_shards, 1)
    assert "optimizer ('muon') needs whole matrices" in message


def test_weight_decay_can_be_that_of_clip() -> None:
    network = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(4, 4, 3))
    clip = ContrastiveTrainingConfig().optimizer
    decayed, spared = build_optimizer(network, clip).param_groups
    assert [parameter.ndim for parameter in decayed["params"]] == [2, 2, 4]
    assert {parameter.ndim for parameter in spared["params"]} == {1}
    decayed, _ = build_optimizer(network, dataclasses.replace(clip, decay_embeddings=False)).param_groups
    assert [parameter.ndim for parameter in decayed["params"]] == [2, 4]


def test_what_is_frozen_is_not_trained() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    groups = build_optimizer(network, OptimizerConfig()).param_groups
    assert sum(len(group["params"]) for group in groups) == 2


@pytest.mark.parametrize("setting", ["beta1", "beta2", "epsilon", "weight_decay", "learning_rate"])
def test_each_setting_of_adamw_changes_the_second_step(setting: str) -> None:
    def trained(config: OptimizerConfig) -> torch.Tensor:
        network = nn.Linear(3, 1, bias=False)
        nn.init.constant_(network.weight, 1.0)
        optimizer = build_optimizer(network, config)
        for scale in (1.0, 0.1):
            network.weight.grad = torch.tensor([[1.0, 1e-8, -2.0]]) * scale
            optimizer.step()
        return network.weight.detach()

    base, changes = OptimizerConfig(), dict[str, Any]({setting: 0.5})
    assert not torch.equal(trained(base), trained(dataclasses.replace(base, **changes)))


def _factors(schedule: ScheduleConfig, num_steps: int) -> list[float]:
    return [learning_rate_factor(step, OptimizerConfig(learning_rate=0.5), schedule) for step in range(num_steps)]


def test_cosine_rises_over_the_warm_up_and_ends_where_it_is_told() -> None:
    cosine = ScheduleConfig(name="cosine", warmup_steps=4, total_steps=24)
    factors = _factors(cosine, 27)
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[14] == pytest.approx(0.5)
    assert factors[24:] == [0, 0, 0]
    assert _factors(dataclasses.replace(cosine, final_learning_rate=0.05), 27)[24:] == pytest.approx([0.1] * 3)
    assert _factors(dataclasses.replace(cosine, warmup_steps=0), 1) == [1]


def test_constant_stays_after_the_warm_up() -> None:
    assert _factors(ScheduleConfig(warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_learning_rate_follows_the_schedule() -> None:
    network = nn.Linear(1, 1)
    schedule = ScheduleConfig(name="cosine", warmup_steps=1, total_steps=3)
    (optimizer,), (entry,) = build_optimization(network, OptimizerConfig(learning_rate=0.5), schedule)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        entry["scheduler"].step()
    assert rates == pytest.approx([0.25, 0.5, 0.25, 0])


def _steps(config: OptimizerConfig, schedule: ScheduleConfig) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = build_optimizer(SparseTransformer(TINY), config)
    plateau, ramp = (entry["scheduler"] for entry in build_schedulers(optimizer, config, schedule))
    optimizer.step()

    def update(loss: float | None = None) -> float:
        ramp.step()
        if loss is not None:
            plateau.step(loss)
        rates = {group["lr"] for group in optimizer.param_groups}
        assert len(rates) == 1
        return rates.pop()

    return optimizer, update


def test_plateau_warms_up_and_halves_five_times_at_most() -> None:
    schedule = ScheduleConfig(name="plateau", warmup_steps=4, plateau_patience=1)
    optimizer, update = _steps(OptimizerConfig(learning_rate=1.0), schedule)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert [update() for _ in range(6)] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
    assert update(loss=3.0) == pytest.approx(1.0)
    assert update(loss=2.0) == pytest.approx(1.0)
    assert [update(loss=2.0) for _ in range(2)] == pytest.approx([1.0, 0.5])
    for _ in range(20):
        last = update(loss=2.0)
    assert last == pytest.approx(1 / 32)


def test_plateau_is_looked_for_at_its_interval() -> None:
    schedule, config = ScheduleConfig(name="plateau", plateau_interval=7), OptimizerConfig()
    (plateau,) = build_schedulers(build_optimizer(SparseTransformer(TINY), config), config, schedule, "val/other")
    assert (plateau["monitor"], plateau["interval"], plateau["frequency"]) == ("val/other", "step", 7)


def test_a_mapping_of_some_fields_keeps_the_defaults_of_the_others() -> None:
    training = as_config(TextToImageTrainingConfig, {"optimizer": {"learning_rate": 1.0}}, "training")
    assert training.optimizer == dataclasses.replace(PAPER.optimizer, learning_rate=1.0)
    assert training.schedule == PAPER.schedule


OPTIMIZER_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": 0.0}, r"learning_rate \(0.0\) must be positive"),
    ({"learning_rate": math.nan}, r"learning_rate \(nan\)"),
    ({"epsilon": 0.0}, r"epsilon \(0.0\) must be positive"),
    ({"weight_decay": -0.1}, r"weight_decay \(-0.1\)"),
    ({"beta1": 1.5}, r"beta1 \(1.5\) must be in \[0, 1\)"),
    ({"beta2": 1.0}, r"beta2 \(1.0\) must be in \[0, 1\)"),
    ({"moments": "8bit"}, r"moments \('8bit'\) must be '32bit' or '16bit'"),
    ({"name": "sgd"}, r"name \('sgd'\) must be 'adamw' or 'muon'"),
    ({"name": "muon", "moments": "16bit"}, r"moments \('16bit'\) are AdamW's"),
]
SCHEDULE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"name": "linear"}, r"name \('linear'\) must be 'constant' or 'cosine' or 'plateau'"),
    ({"plateau_interval": 0}, r"plateau_interval \(0\) must be positive"),
    ({"warmup_steps": -1}, r"warmup_steps \(-1\) must be at least 0"),
    ({"plateau_patience": -1}, r"plateau_patience \(-1\)"),
    ({"plateau_halvings": -1}, r"plateau_halvings \(-1\)"),
    ({"total_steps": 100}, r"total_steps \(100\) has no effect on schedule 'constant'"),
    ({"name": "plateau", "final_learning_rate": 0.1}, r"final_learning_rate \(0.1\) has no effect on schedule"),
    ({"name": "cosine"}, r"total_steps \(None\) must exceed warmup_steps \(0\)"),
    ({"name": "cosine", "warmup_steps": 9, "total_steps": 9}, r"total_steps \(9\) must exceed warmup_steps \(9\)"),
]


@pytest.mark.parametrize(("settings", "message"), OPTIMIZER_ERRORS)
def test_bad_settings_of_the_optimizer_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.parametrize(("settings", "message"), SCHEDULE_ERRORS)
def test_bad_settings_of_the_schedule_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_loss_weight": -0.5}, r"text_loss_weight \(-0.5\) must be in \[0, 1\]"),
        ({"image_token_noise": 1.1}, r"image_token_noise \(1.1\) must be in \[0, 1\]"),
        ({"kept_image_tokens": -1}, r"kept_image_tokens \(-1\) must be at least 0"),
        ({"caption_dropout": 1.1}, r"caption_dropout \(1.1\) must be in \[0, 1\]"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextToImageTrainingConfig(**settings)
