"""AdamW with 16-bit moments against torch's AdamW and against the formats' rounding."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from lightning_dalle.ops.float_formats import FLOAT_0_6_10, FLOAT_1_6_9, decode, encode
from lightning_dalle.optim import AdamW16

SHAPES = [(300, 70), (40, 30), (7,), (2, 3, 5, 5), (1,)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(tensors: list[nn.Parameter], seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = (size * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_32_bit_moments_are_exactly_those_of_torch(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.96), "weight_decay": weight_decay}
    optimizer = AdamW16(ours, moments="32bit", max_variance=None, **options)
    reference = torch.optim.AdamW(theirs, foreach=True, **options)
    for step in range(20):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
        assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][name], reference.state[other][name])


@given(length=st.integers(1, 70_000), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_a_step_is_that_of_torch_on_moments_that_are_rounded_after_it(length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = nn.Parameter(torch.randn(length, generator=generator))
    theirs = copy.deepcopy(ours)
    optimizer = AdamW16([ours], betas=(0.9, 0.96), min_16bit_size=0)
    reference = torch.optim.AdamW([theirs], betas=(0.9, 0.96), foreach=True)
    for _ in range(3):
        gradient = torch.randn(length, generator=generator)
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(ours, theirs)
        state = reference.state[theirs]
        codes = encode(state["exp_avg"], FLOAT_1_6_9), encode(state["exp_avg_sq"], FLOAT_0_6_10)
        assert torch.equal(optimizer.state[ours]["exp_avg"], codes[0])
        assert torch.equal(optimizer.state[ours]["exp_avg_sq"], codes[1])
        state["exp_avg"].copy_(decode(codes[0], FLOAT_1_6_9))
        state["exp_avg_sq"].copy_(decode(codes[1], FLOAT_0_6_10))


def test_moments_take_two_bytes() -> None:
    parameter = nn.Parameter(torch.zeros(128, 64))
    optimizer = AdamW16([parameter])
    parameter.grad = torch.ones(128, 64)
    optimizer.step()
    state = optimizer.state[parameter]
    moments = [tensor for name, tensor in state.items() if name != "step"]
    assert [moment.untyped_storage().nbytes() for moment in moments] == [2 * 128 * 64, 2 * 128 * 64]
    assert all(moment.shape == parameter.shape for moment in moments)


def test_small_and_named_parameters_keep_32_bit_moments() -> None:
    module = nn.ModuleDict({"text_embedding": nn.Embedding(200, 32), "inner": nn.Linear(32, 200)})
    optimizer = AdamW16(module.named_parameters(), keep_32bit="embedding|head")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dtypes = {name: optimizer.state[value]["exp_avg"].dtype for name, value in module.named_parameters()}
    assert dtypes == {
        "text_embedding.weight": torch.float32,
        "inner.weight": torch.int16,
        "inner.bias": torch.float32,
    }


def test_groups_can_differ() -> None:
    matrices, plain = parameters()[:1], parameters()[:1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": plain, "moments": "32bit", "lr": 0.0}]
    optimizer = AdamW16(groups, lr=0.1, weight_decay=0.0)
    before = plain[0].clone()
    set_gradients(matrices + plain, 0)
    optimizer.step()
    assert optimizer.state[matrices[0]]["exp_avg"].dtype == torch.int16
    assert optimizer.state[plain[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(plain[0], before)


@pytest.mark.parametrize("moments", ["16bit", "32bit"])
def test_variance_is_clipped_by_value_before_use(moments: Any) -> None:
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = AdamW16([parameter], lr=1.0, weight_decay=0.0, eps=0.0, moments=moments, min_16bit_size=0)
    parameter.grad = torch.full((10,), 1000.0)
    optimizer.step()
    # v = 0.001 * 1e6 is clipped to 5; the corrected mean is 1000, the corrected variance 5 / 0.001.
    torch.testing.assert_close(parameter.detach(), torch.full((10,), -1000 / math.sqrt(5000)))
    variance = optimizer.state[parameter]["exp_avg_sq"]
    assert (decode(variance, FLOAT_0_6_10) if moments == "16bit" else variance).tolist() == [5.0] * 10


def test_large_moments_saturate_instead_of_becoming_infinite() -> None:
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = AdamW16([parameter], min_16bit_size=0, max_variance=None)
    parameter.grad = torch.full((10,), -1e6)
    optimizer.step()
    state = optimizer.state[parameter]
    assert decode(state["exp_avg"], FLOAT_1_6_9).tolist() == [-FLOAT_1_6_9.largest] * 10
    assert decode(state["exp_avg_sq"], FLOAT_0_6_10).tolist() == [FLOAT_0_6_10.largest] * 10


def test_double_precision_keeps_moments_of_its_own() -> None:
    ours = [nn.Parameter(torch.linspace(-1, 1, 5000, dtype=torch.float64))]
    theirs = copy.deepcopy(ours)
    run(AdamW16(ours, max_variance=None), ours, range(3))
    run(torch.optim.AdamW(theirs, foreach=True), theirs, range(3))
    assert_same(ours, theirs)


def test_parameters_without_gradient_do_not_hold_up_others() -> None:
    tensors = parameters()
    before = [tensor.detach().clone() for tensor in tensors]
    set_gradients(tensors, 0)
    tensors[0].grad = None
    AdamW16(tensors).step()
    assert [torch.equal(*pair) for pair in zip(tensors, before, strict=True)] == [True, False, False, False, False]


def test_moments_in_32_bits_follow_any_beta() -> None:
    assert AdamW16(parameters(), betas=(0.9, 0.99999), moments="32bit").param_groups[0]["betas"] == (0.9, 0.99999)


def test_a_non_finite_gradient_shows_in_the_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = AdamW16([parameter], min_16bit_size=0)
    parameter.grad = torch.tensor([math.nan, math.inf])
    optimizer.step()
    assert not parameter.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_16_bits_are_updated_in_32(dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    wide = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    set_gradients(ours, 0)
    for parameter, other in zip(ours, wide, strict=True):
        other.grad = parameter.grad.float()
    AdamW16(ours, lr=0.1, min_16bit_size=0).step()
    AdamW16(wide, lr=0.1, min_16bit_size=0).step()
    assert_same(ours, [nn.Parameter(parameter.detach().to(dtype)) for parameter in wide])


def test_parameters_that_are_not_contiguous_are_updated_alike() -> None:
    dense = nn.Parameter(torch.randn(3, 4, 5, 6))
    strided = nn.Parameter(dense.detach().clone().to(memory_format=torch.channels_last))
    gradient = torch.randn(3, 4, 5, 6)
    for parameter in (dense, strided):
        optimizer = AdamW16([parameter], min_16bit_size=0)
        parameter.grad = gradient.clone()
        optimizer.step()
        optimizer.step()
    assert torch.equal(dense, strided)


def run(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(tensors, step, size=0.1)
        optimizer.step()


def test_saved_and_loaded_it_goes_on_bit_by_bit() -> None:
    whole, resumed = parameters(), parameters()
    first, second = AdamW16(whole), AdamW16(resumed)
    run(first, whole, range(5))
    run(second, resumed, range(3))
    again = AdamW16(resumed)
    again.load_state_dict(copy.deepcopy(second.state_dict()))
    assert again.state[resumed[0]]["exp_avg"].dtype == torch.int16
    run(again, resumed, range(3, 5))
    assert_same(whole, resumed)


def test_16_bit_parameters_keep_their_codes_through_a_checkpoint() -> None:
    tensors = parameters(torch.bfloat16)
    optimizer = AdamW16(tensors)
    run(optimizer, tensors, range(3))
    again = AdamW16(tensors)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(again.state[tensors[0]]["exp_avg"], optimizer.state[tensors[0]]["exp_avg"])


def test_states_are_exchanged_with_torch() -> None:
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs)
    run(reference, theirs, range(3))
    optimizer = AdamW16(ours)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    loaded, saved = optimizer.state[ours[0]], reference.state[theirs[0]]
    assert torch.equal(loaded["exp_avg"], encode(saved["exp_avg"], FLOAT_1_6_9))
    plain = AdamW16(ours, moments="32bit")
    plain.load_state_dict(
        {
            "state": optimizer.state_dict()["state"],
            "param_groups": [{**optimizer.state_dict()["param_groups"][0], "moments": "32bit"}],
        }
    )
    assert torch.equal(plain.state[ours[0]]["exp_avg"], decode(loaded["exp_avg"], FLOAT_1_6_9))


def test_a_closure_is_called_with_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW16([parameter])

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0  # type: ignore[arg-type]
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr \(-1.0\) must be at least 0"),
        ({"moments": "8bit"}, r"moments \('8bit'\) must be '16bit' or '32bit'"),
        ({"max_variance": 0.0}, r"max_variance \(0.0\) must be positive, or None"),
        ({"betas": (0.9, 1.0)}, r"betas \(\(0.9, 1.0\)\) must be in \[0, 1\)"),
        ({"betas": (0.9, 0.9999)}, r"beta \(0.9999\) of exp_avg_sq must be at most 0.9995.*; lower it, or set moments"),
        ({"keep_32bit": "bias"}, r"keep_32bit \('bias'\) needs the names of parameters; pass module.named_parameters"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW16(parameters(), **options)
