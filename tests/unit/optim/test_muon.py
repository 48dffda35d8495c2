"""Updates are torch's up to bfloat16, whatever the shapes, and bfloat16 is left where it is slow."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import Parameter

from lightning_dalle.optim import Muon, muon
from lightning_dalle.optim.muon import orthogonalise

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = ((12, 12), (48, 12), (12, 48), (48, 12), (13, 5), (1, 7))
EPSILON_OF_BFLOAT16 = 2.0**-8


def matrices(seed: int, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(optimizer: torch.optim.Optimizer, parameters: list[Parameter], steps: range) -> list[Tensor]:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("fast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "spectral_unclamped"}],
    ids=["default", "plain momentum", "as AdamW", "spectral"],
)
def test_equals_torch_up_to_bfloat16(monkeypatch: pytest.MonkeyPatch, fast: bool, options: dict[str, Any]) -> None:
    monkeypatch.setattr(muon, "has_fast_bfloat16", lambda device: fast)
    before, ours, theirs = matrices(0), matrices(0), matrices(0)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, **options}
    train(Muon(ours, **settings), ours, range(3))
    train(torch.optim.Muon(theirs, **settings), theirs, range(3))
    for start, mine, other in zip(before, ours, theirs, strict=True):
        # Five steps of two products each, rounded to 8 bits.
        assert (mine - other).norm() <= 10 * EPSILON_OF_BFLOAT16 * (other - start).norm()


def in_double(matrix: Tensor, num_steps: int) -> Tensor:
    """The iteration as Jordan et al. write it."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm().clamp(min=1e-7)
    x = x.T if (transposed := x.shape[0] > x.shape[1]) else x
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 120),
    batch=st.integers(1, 3),
    rank=st.integers(0, 40),
    num_steps=st.integers(0, 8),
    seed=st.integers(0, 2**31),
)
def test_each_matrix_of_a_batch_is_orthogonalised_as_in_double_precision(
    rows: int, columns: int, batch: int, rank: int, num_steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(batch, rows, rank, generator=generator),
        torch.randn(batch, rank, columns, generator=generator),
    )
    whole = left @ right
    result = orthogonalise(whole, COEFFICIENTS, num_steps, 1e-7)
    expected = torch.stack([in_double(matrix, num_steps) for matrix in whole])
    # What rounding adds is amplified by 3.4 in each step, as are small singular values.
    bar = 50 * 2.0**-24 * COEFFICIENTS[0] ** num_steps
    assert (result - expected).abs().max() <= bar


def test_parameters_without_a_gradient_stay() -> None:
    parameters = matrices(0)
    give_gradients(parameters, 0)
    parameters[2].grad = None
    before = [parameter.detach().clone() for parameter in parameters]
    Muon(parameters).step()
    moved = [not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)]
    assert moved == [True, True, False, True, True, True]


def test_a_gradient_of_zeros_moves_nothing_and_makes_no_nan() -> None:
    parameters = matrices(0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    Muon(parameters, weight_decay=0.0).step()
    torch.testing.assert_close([parameter.detach() for parameter in parameters], before, rtol=0, atol=0)


def test_matrices_beyond_one_batch_are_updated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((8, 6),) * 5
    whole, parts = matrices(0, shapes), matrices(0, shapes)
    expected = train(Muon(whole), whole, range(2))
    monkeypatch.setattr(muon, "_BATCH_ELEMENTS", 100)
    torch.testing.assert_close(train(Muon(parts), parts, range(2)), expected)


def test_gradients_that_are_not_contiguous_are_taken_as_they_are() -> None:
    plain, strided = matrices(0), matrices(0)
    give_gradients(plain, 0)
    for parameter, like in zip(strided, plain, strict=True):
        assert like.grad is not None
        parameter.grad = like.grad.T.contiguous().T
    for parameters in (plain, strided):
        Muon(parameters).step()
    torch.testing.assert_close(strided, plain)


def test_the_callers_gradients_are_not_changed() -> None:
    parameters = matrices(0)
    give_gradients(parameters, 0)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    Muon(parameters, nesterov=False).step()
    torch.testing.assert_close([parameter.grad for parameter in parameters], before, rtol=0, atol=0)


def test_states_of_torch_are_loaded_and_given() -> None:
    ours, theirs = matrices(0), matrices(0)
    optimizer, reference = Muon(ours), torch.optim.Muon(theirs)
    train(reference, theirs, range(2))
    optimizer.load_state_dict(reference.state_dict())
    mine, other = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        torch.testing.assert_close(mine["state"][index]["momentum_buffer"], state["momentum_buffer"], rtol=0, atol=0)


def test_half_precision_parameters_are_updated() -> None:
    parameters = [Parameter(torch.randn(8, 6).bfloat16())]
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.randn(8, 6).bfloat16()
    Muon(parameters, lr=0.5).step()
    assert parameters[0].dtype == torch.bfloat16
    assert parameters[0].isfinite().all()
    assert not torch.equal(parameters[0].detach(), before)


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="2D"):
        Muon([Parameter(torch.zeros(3))])
