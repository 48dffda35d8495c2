"""Samplers on a flow whose end is known in closed form, guidance, and noise that knows no rank."""

import math

import pytest
import torch

from lightning_dalle.ops.flow_matching import velocity_towards
from lightning_dalle.sampling.flow_matching import Solver, guide, integrate, keyed_noise

MEAN, DEVIATION = 0.7, 0.5


def _velocity(points: torch.Tensor, time: float) -> torch.Tensor:
    """That of data from a normal distribution: E[noise - data | point]."""
    variance = (1 - time) ** 2 * DEVIATION**2 + time**2
    slope = (time - (1 - time) * DEVIATION**2) / variance
    return -MEAN + slope * (points - (1 - time) * MEAN)


def _end(noise: torch.Tensor) -> torch.Tensor:
    """Where that flow ends: at the same quantile."""
    return MEAN + DEVIATION * noise


def _error(solver: Solver, num_steps: int, shift: float = 1.0) -> float:
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(1)
    arrived = integrate(_velocity, noise, num_steps=num_steps, solver=solver, shift=shift)
    return float((arrived - _end(noise)).abs().max())


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
@pytest.mark.parametrize("shift", [1.0, 4.0])
def test_error_falls_with_the_solver_s_order(solver: Solver, order: int, shift: float) -> None:
    coarse, fine = _error(solver, 64, shift), _error(solver, 128, shift)
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.3)
    assert fine < (0.03 if order == 1 else 1e-4)


def test_samples_have_the_mean_and_deviation_of_the_data() -> None:
    noise = keyed_noise(0, [(sample,) for sample in range(4)], (5000,)).double()
    samples = integrate(_velocity, noise, num_steps=30, solver="heun")
    # Four standard errors at 20,000 samples.
    assert float(samples.mean()) == pytest.approx(MEAN, abs=4 * DEVIATION / 20_000**0.5)
    assert float(samples.std()) == pytest.approx(DEVIATION, abs=4 * DEVIATION / 40_000**0.5)


def test_velocities_towards_the_best_guess_of_the_data_lead_to_the_same_end() -> None:
    def towards(points: torch.Tensor, time: float) -> torch.Tensor:
        variance = (1 - time) ** 2 * DEVIATION**2 + time**2
        guess = MEAN + (1 - time) * DEVIATION**2 / variance * (points - (1 - time) * MEAN)
        return velocity_towards(points, guess, torch.full((len(points),), time, dtype=points.dtype))

    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(1)
    # Of these steps none begins below the least time.
    arrived = integrate(towards, noise, num_steps=20)
    torch.testing.assert_close(arrived, integrate(_velocity, noise, num_steps=20), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 30, 100])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_a_perfect_prediction_of_clean_data_is_reached_in_any_number_of_steps(solver: Solver, num_steps: int) -> None:
    noise, data = torch.randn(100, 1, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)

    def towards(points: torch.Tensor, time: float) -> torch.Tensor:
        times = torch.full((len(points),), time, dtype=points.dtype)
        return velocity_towards(points, data.expand_as(points), times, least_time=1e-6)

    arrived = integrate(towards, noise, num_steps=num_steps, solver=solver, predicts_data=True)
    torch.testing.assert_close(arrived, data.expand_as(noise), rtol=0, atol=1e-12)


def test_each_step_is_told() -> None:
    steps: list[int] = []
    integrate(_velocity, torch.zeros(1, 1), num_steps=5, on_step=lambda: steps.append(1))
    assert len(steps) == 5


def test_guidance_goes_from_no_caption_through_the_caption_and_beyond() -> None:
    conditional, unconditional = torch.randn(2, 3, 4)
    torch.testing.assert_close(guide(conditional, unconditional, 0.0), unconditional)
    torch.testing.assert_close(guide(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(guide(conditional, unconditional, 3.0), 3 * conditional - 2 * unconditional)


def test_noise_belongs_to_seed_sample_and_step() -> None:
    noise = keyed_noise(3, [(0,), (1,), (2,)], (2, 4))
    assert torch.equal(noise[1:2], keyed_noise(3, [(1,)], (2, 4)))
    others = [keyed_noise(4, [(1,)], (2, 4)), keyed_noise(3, [(1,)], (2, 4), step=1), noise[:1], noise[2:]]
    assert not any(torch.equal(noise[1:2], other) for other in others)
    state = torch.get_rng_state()
    keyed_noise(3, [(0,)], (2,))
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_settings_are_named() -> None:
    points = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"solver \('rk4'\) must be one of euler, heun"):
        integrate(_velocity, points, num_steps=2, solver="rk4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_steps \(0\)"):
        integrate(_velocity, points, num_steps=0)
    for scale in (-1.0, math.inf):
        with pytest.raises(ValueError, match=r"guidance_scale \(.*\) must be finite and at least 0"):
            guide(points, points, scale)
    with pytest.raises(RuntimeError, match="velocities are not finite"):
        integrate(lambda points, time: points * math.nan, points, num_steps=1)
