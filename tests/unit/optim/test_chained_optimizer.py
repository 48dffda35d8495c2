"""Two optimizers as one do what they do apart."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dalle.optim import ChainedOptimizer


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def parts_of(network: nn.Sequential) -> tuple[Optimizer, Optimizer]:
    named = dict(network.named_parameters())
    matrices = [named["1.weight"], named["3.weight"]]
    others = [named["0.weight"], named["3.bias"]]
    groups: list[dict[str, Any]] = [{"params": others[:1]}, {"params": others[1:], "lr": 0.5}]
    return Muon(matrices, lr=0.02), AdamW(groups, lr=0.01)


def backward(network: nn.Sequential, step: int) -> None:
    tokens = torch.randint(7, (4,), generator=torch.Generator().manual_seed(step))
    network.zero_grad()
    network(tokens).square().sum().backward()


def train(network: nn.Sequential, optimizers: list[Optimizer], steps: range) -> list[Tensor]:
    for step in steps:
        backward(network, step)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


def test_equals_its_parts_apart() -> None:
    apart, chained = make_network(), make_network()
    expected = train(apart, list(parts_of(apart)), range(5))
    torch.testing.assert_close(
        train(chained, [ChainedOptimizer(*parts_of(chained))], range(5)), expected, rtol=0, atol=0
    )


def test_a_schedule_reaches_the_parts() -> None:
    network = make_network()
    chained = ChainedOptimizer(*parts_of(network))
    schedule = LambdaLR(chained, lambda update: 1.0 if update == 0 else 0.0)
    train(network, [chained], range(1))
    schedule.step()
    assert [group["lr"] for part in chained.optimizers for group in part.param_groups] == [0, 0, 0]
    before = [parameter.detach().clone() for parameter in network.parameters()]
    torch.testing.assert_close(train(network, [chained], range(1, 2)), before, rtol=0, atol=0)


def test_resumes_exactly_and_stays_chained() -> None:
    whole = make_network()
    expected = train(whole, [ChainedOptimizer(*parts_of(whole))], range(6))
    first = make_network()
    stopped = ChainedOptimizer(*parts_of(first))
    train(first, [stopped], range(3))
    second = make_network()
    second.load_state_dict(first.state_dict())
    resumed = ChainedOptimizer(*parts_of(second))
    resumed.load_state_dict(stopped.state_dict())
    torch.testing.assert_close(train(second, [resumed], range(3, 6)), expected, rtol=0, atol=0)
    resumed.param_groups[0]["lr"] = 7.0
    assert resumed.optimizers[0].param_groups[0]["lr"] == 7


def test_the_closure_runs_once_with_gradients() -> None:
    network = make_network()
    chained = ChainedOptimizer(*parts_of(network))
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = network(torch.tensor([1])).sum()
        loss.backward()
        return loss

    assert isinstance(chained.step(closure), Tensor)
    assert calls == [True]


def test_refuses_what_cannot_be_chained() -> None:
    network = make_network()
    with pytest.raises(ValueError, match=r"optimizers \(\) is empty"):
        ChainedOptimizer()
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ChainedOptimizer(SGD(network.parameters()), SGD(network[1].parameters()))
    stepped = SGD(network.parameters(), momentum=0.9)
    train(network, [stepped], range(1))
    with pytest.raises(ValueError, match=r"optimizers \(SGD\) were stepped already"):
        ChainedOptimizer(stepped)
