import pytest
import torch
from torch import nn

from lightning_dalle.models.modes import evaluation_mode


def test_each_part_returns_to_its_own_mode() -> None:
    network = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).train()
    network[1].eval()
    with evaluation_mode(network):
        assert not any(part.training for part in network.modules())
        assert not torch.is_grad_enabled()
    assert [part.training for part in network.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_modes_return_after_an_error() -> None:
    network = nn.Dropout().train()
    with pytest.raises(KeyError), evaluation_mode(network):
        raise KeyError
    assert network.training
