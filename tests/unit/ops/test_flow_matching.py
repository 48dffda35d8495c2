"""Lines between data and noise, and the times of training and sampling."""

import pytest
import torch

from lightning_dalle.ops.flow_matching import (
    draw_times,
    interpolate,
    resolution_shift,
    sampling_times,
    shift_times,
    velocity_target,
    velocity_towards,
)


def test_lines_begin_at_data_and_end_at_noise_with_the_target_as_derivative() -> None:
    data, noise = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    ends = interpolate(data, noise, torch.tensor([0.0, 1.0, 0.0]).double())
    torch.testing.assert_close(ends, torch.stack([data[0], noise[1], data[2]]))
    times = torch.rand(3, dtype=torch.float64)
    difference = (interpolate(data, noise, times + 1e-6) - interpolate(data, noise, times - 1e-6)) / 2e-6
    torch.testing.assert_close(difference, velocity_target(data, noise), rtol=0, atol=1e-8)


def test_best_velocity_for_a_gaussian_is_the_closed_form_one() -> None:
    # For data of mean m and variance s^2, regressing the target on the point gives a known line in the point.
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 200_000, 1, dtype=torch.float64, generator=generator)
    mean, deviation = 0.7, 0.5
    data = mean + deviation * data
    for time in (0.2, 0.5, 0.9):
        points = interpolate(data, noise, torch.full((len(data),), time).double())
        target = velocity_target(data, noise)
        variance = (1 - time) ** 2 * deviation**2 + time**2
        slope = (time - (1 - time) * deviation**2) / variance
        centred = points - points.mean()
        regressed = float((centred * target).mean() / centred.square().mean())
        # Four standard errors of a regression on this many points.
        assert regressed == pytest.approx(slope, abs=0.02)
        assert float(target.mean()) == pytest.approx(-mean, abs=0.02)


def test_velocity_towards_the_best_guess_of_gaussian_data_is_the_best_velocity() -> None:
    mean, deviation = 0.7, 0.5
    points = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(1)
    for time in (0.05, 0.2, 0.5, 0.9, 1.0):
        variance = (1 - time) ** 2 * deviation**2 + time**2
        centred = points - (1 - time) * mean
        guess = mean + (1 - time) * deviation**2 / variance * centred
        slope = (time - (1 - time) * deviation**2) / variance
        velocity = velocity_towards(points, guess, torch.full((9,), time, dtype=torch.float64))
        torch.testing.assert_close(velocity, -mean + slope * centred, rtol=0, atol=1e-12)


def test_velocity_towards_data_is_the_line_s_and_errors_are_not_magnified_without_bound() -> None:
    data, noise = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    times = torch.tensor([0.05, 0.4, 1.0]).double()
    points = interpolate(data, noise, times)
    torch.testing.assert_close(velocity_towards(points, data, times), velocity_target(data, noise))
    near = velocity_towards(data + 1, data, torch.tensor([0.0, 1e-6, 0.1]).double())
    torch.testing.assert_close(near[:, 0, 0], torch.tensor([20.0, 20.0, 10.0]).double())


def test_times_follow_their_density() -> None:
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.equal(draw_times(uniforms), uniforms)
    logits = draw_times(uniforms, "logit_normal").logit()
    assert float(logits.mean()) == pytest.approx(0, abs=1e-6)
    assert float(logits.std()) == pytest.approx(1, abs=0.01)


def test_shift_keeps_the_ends_and_is_undone_by_its_inverse() -> None:
    times = torch.linspace(0, 1, 11, dtype=torch.float64)
    shifted = shift_times(times, 4.0)
    assert shifted[0] == 0
    assert shifted[-1] == 1
    assert (shifted[1:-1] > times[1:-1]).all()
    torch.testing.assert_close(shift_times(shifted, 0.25), times)
    torch.testing.assert_close(shifted, 4 * times / (1 + 3 * times))
    shifts = torch.arange(1, 12).double()
    assert shift_times(times, shifts)[3] == shifted[3]


def test_four_times_the_values_double_the_shift() -> None:
    assert resolution_shift(100, 100, 3.0) == 3.0
    assert resolution_shift(400, 100, 3.0) == 6.0


def test_sampling_times_fall_from_noise_to_data() -> None:
    torch.testing.assert_close(sampling_times(4), torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64))
    shifted = sampling_times(4, shift=3.0)
    torch.testing.assert_close(shifted, shift_times(sampling_times(4), 3.0))


def test_bad_settings_are_named() -> None:
    uniforms = torch.rand(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"density \('normal'\) must be one of uniform, logit_normal"):
        draw_times(uniforms, "normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_steps \(0\) must be at least 1"):
        sampling_times(0)
    with pytest.raises(ValueError, match=r"shift \(-1.0\) must be positive"):
        sampling_times(2, -1.0)
