"""The video module with sharded sequences against one process: packed clips, both conditionings."""

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_dalle import ContextParallelSession, ContextParallelStrategy, VideoDiTModule
from lightning_dalle.distributed.context_parallel.comm import init_context_groups
from lightning_dalle.distributed.context_parallel.hooks import attach_plan
from tests.distributed.toy_module import trainer_of
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.rounding import assert_only_rounded
from tests.unit.lightning_modules.tiny_video_dit import CAPTIONS, NETWORK, TRAINING, loader, tiny_module

pytestmark = LIGHTNING_WARNINGS
SIZES = [(4, 8, 8), (3, 4, 8), (1, 8, 4)]
LOSSES: list[float] = []


class _Recorded(VideoDiTModule):
    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        LOSSES.append(loss.item())
        return loss


def _module(conditioning: str, checkpointing: bool = False) -> VideoDiTModule:
    network = dataclasses.replace(
        NETWORK,
        conditioning=conditioning,  # type: ignore[arg-type]
        pooled_text=conditioning == "joint",
        position_features=6 if conditioning == "joint" else 0,
        activation_checkpointing=checkpointing,
    )
    module = tiny_module(std=0.3, network=network)
    module.__class__ = _Recorded
    return module


def _steps(conditioning: str, session: ContextParallelSession | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients of a batch of clips of one size and of a packed one, in float64."""
    module = _module(conditioning).double()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    handles = [] if session is None else attach_plan(module, session)
    generator = torch.Generator().manual_seed(4)
    results = []
    for sizes in ([SIZES[0]] * 3, SIZES):
        latents: Any = [torch.randn(3, *size, dtype=torch.float64, generator=generator) for size in sizes]
        batch = {"latents": torch.stack(latents) if len(set(sizes)) == 1 else latents, "caption": CAPTIONS}
        module.zero_grad()
        if session is None:
            loss = module.training_step(batch, 0)
            loss.backward()
        else:
            with session.step(batch) as local:
                loss = module.training_step(local, 0)
                loss.backward()
        gradients = {name: part.grad.clone() for name, part in module.named_parameters() if part.grad is not None}
        if session is not None and session.groups.context is not None:
            for gradient in gradients.values():
                torch.distributed.all_reduce(gradient)
                gradient /= session.groups.size
        results.append((loss.detach(), gradients))
    for handle in handles:
        handle.remove()
    return results


def _steps_on_rank(rank: int, world_size: int) -> list[list[tuple[Tensor, dict[str, Tensor]]]]:
    answers = []
    for conditioning in ("cross_attention", "joint"):
        for ulysses_degree in (1, 2):
            groups = init_context_groups(world_size, world_size, ulysses_degree, "cpu")
            session = ContextParallelSession(_module(conditioning).sequence_plan(), groups)
            answers.append(_steps(conditioning, session))
    return answers


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(world_size: int) -> None:
    expected = [_steps(conditioning, None) for conditioning in ("cross_attention", "joint") for _ in range(2)]
    assert all(len(gradients) > 30 for steps in expected for _, gradients in steps)
    for answers in run_ranks(_steps_on_rank, world_size, world_size, timeout=250):
        torch.testing.assert_close(answers, expected, rtol=0, atol=1e-10)


def _widen(_: Any, args: Any, kwargs: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, (args, kwargs)
    )


def _fit(strategy: Any, devices: int, double: bool = False) -> dict[str, Any]:
    module = _module("joint", checkpointing=True)
    if double:
        # Latents, captions and times stay those of single precision.
        module.network.double().register_forward_pre_hook(_widen, with_kwargs=True)
    LOSSES.clear()
    trainer = trainer_of(devices, strategy, limit_val_batches=0 if double else 1)
    trainer.fit(module, loader(20), loader(1))
    if double:
        return {"losses": list(LOSSES)}
    predicted: Any = trainer.predict(module, loader(1))
    return {"losses": list(LOSSES), "predicted": predicted[0]}


def _fit_on_rank(rank: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    return _fit(ContextParallelStrategy(), 2)


def test_training_and_sampling_are_those_of_one_process() -> None:
    expected, exact = _fit("auto", 1), _fit("auto", 1, double=True)
    assert len(expected["losses"]) == 20
    assert TRAINING.first_frame_share > 0
    for answer in run_ranks(_fit_on_rank, 2, timeout=200):
        assert_only_rounded(answer["losses"], expected["losses"], exact["losses"])
        # A value in the middle between two may be rounded otherwise.
        assert (answer["predicted"].int() - expected["predicted"].int()).abs().max() <= 1
