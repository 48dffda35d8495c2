"""The logit-Laplace density and the map of pixels into its support."""

import dall_e
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.dvae_losses import dequantise, logit_laplace_log_density, map_pixels, unmap_pixels


@pytest.mark.parametrize(("mu", "log_scale"), [(0.0, 0.0), (1.5, -2.0), (-3.0, 0.4), (2.0, -4.0)])
def test_density_integrates_to_one(mu: float, log_scale: float) -> None:
    # Even steps in the logit u put points where the mass is; dx = x (1 - x) du.
    logits = torch.linspace(-36, 36, 2_000_001, dtype=torch.float64)
    x = logits.sigmoid()
    inside = (x > 0) & (x < 1)
    x, logits = x[inside], logits[inside]
    density = logit_laplace_log_density(x, torch.tensor(mu), torch.tensor(log_scale)).exp()
    mass = torch.trapezoid(density * x * (1 - x), logits)
    # The kink at mu costs the trapezoid rule step**2 / b**2, below 1e-6; the tails outside hold less.
    assert mass.item() == pytest.approx(1, abs=1e-5)


def test_density_is_that_of_the_paper() -> None:
    x, mu, b = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64), 0.7, 0.5
    expected = 1 / (2 * b * x * (1 - x)) * torch.exp(-(torch.logit(x) - mu).abs() / b)
    log_density = logit_laplace_log_density(x, torch.tensor(mu), torch.tensor(b).log())
    torch.testing.assert_close(log_density.exp(), expected, check_dtype=False)


@given(pixel=st.sampled_from([0, 255]), mu=st.floats(-20, 20), log_scale=st.floats(-8, 8))
@settings(max_examples=50, deadline=None)
def test_density_and_gradient_are_finite_at_black_and_white(pixel: int, mu: float, log_scale: float) -> None:
    parameters = torch.tensor([mu, log_scale], requires_grad=True)
    mapped = map_pixels(torch.tensor([pixel], dtype=torch.uint8))
    log_density = logit_laplace_log_density(mapped, parameters[0], parameters[1]).sum()
    log_density.backward()
    assert log_density.isfinite()
    assert parameters.grad is not None
    assert parameters.grad.isfinite().all()


def test_pixels_map_as_in_the_released_code_and_back() -> None:
    images = torch.rand(1, 3, 4, 4)
    assert torch.equal(map_pixels(images), dall_e.map_pixels(images))
    assert torch.equal(unmap_pixels(images), dall_e.unmap_pixels(images))


def test_every_grey_level_survives_the_map_and_its_inverse() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    mapped = map_pixels(levels)
    assert mapped[0].item() == pytest.approx(0.1)
    assert mapped[-1].item() == pytest.approx(0.9)
    assert torch.equal((unmap_pixels(mapped) * 255).round().to(torch.uint8), levels)


def test_dequantisation_fills_one_grey_level_without_bias() -> None:
    mapped = map_pixels(torch.full((100_000,), 7, dtype=torch.uint8))
    spread = (dequantise(mapped, torch.Generator().manual_seed(0)) - mapped) * 255 / 0.8
    assert spread.abs().max() <= 0.5 + 1e-3
    # The mean of 1e5 uniforms of width 1 has a standard deviation of 0.0009.
    assert abs(spread.mean()) < 0.004
    assert spread.var().item() == pytest.approx(1 / 12, rel=0.02)
