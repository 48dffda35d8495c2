"""The relaxation of the code and its divergence from the uniform prior."""

import torch
from torch.distributions import Categorical, kl_divergence

from lightning_dalle.ops.dvae_losses import gumbel_noise, gumbel_softmax, kl_to_uniform


def test_kl_equals_torch_distributions() -> None:
    logits = 5 * torch.randn(3, 7, 2, 4, dtype=torch.float64)
    prior = Categorical(logits=torch.zeros(3, 2, 4, 7, dtype=torch.float64))
    expected = kl_divergence(Categorical(logits=logits.movedim(1, -1)), prior).sum(dim=(1, 2))
    torch.testing.assert_close(kl_to_uniform(logits), expected)


def test_kl_does_not_change_with_the_batch_size() -> None:
    logits = torch.randn(4, 7, 3, 3)
    assert torch.equal(kl_to_uniform(logits[:1].expand(6, -1, -1, -1)), kl_to_uniform(logits[:1]).expand(6))
    torch.testing.assert_close(kl_to_uniform(logits).mean(), kl_to_uniform(logits.repeat(5, 1, 1, 1)).mean())


def test_kl_ends_at_zero_and_at_ln_k_per_position() -> None:
    one_hot = torch.zeros(1, 8, 2, 2)
    one_hot[:, 3] = 1e4
    assert kl_to_uniform(torch.zeros(1, 8, 2, 2, dtype=torch.float64)).abs().item() < 1e-14
    torch.testing.assert_close(kl_to_uniform(one_hot), 4 * torch.tensor([8.0]).log())


def test_relaxed_codes_sum_to_one_and_get_hard_with_a_low_temperature() -> None:
    logits = torch.randn(2, 5, 3, 3)
    noise = gumbel_noise(logits, torch.Generator().manual_seed(0))
    torch.testing.assert_close(gumbel_softmax(logits, 1.0, noise).sum(dim=1), torch.ones(2, 3, 3))
    hard = torch.nn.functional.one_hot((logits + noise).argmax(dim=1), 5).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(gumbel_softmax(logits, 1e-4, noise), hard)


def test_perturbed_argmax_samples_the_categorical_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1).expand(1, 3, 200, 200)
    noise = gumbel_noise(logits, torch.Generator().manual_seed(0))
    frequencies = torch.bincount((logits + noise).argmax(dim=1).flatten()) / 40_000
    # Three standard deviations of a frequency at n = 40,000 are below 0.0075.
    torch.testing.assert_close(frequencies, logits[0, :, 0, 0].softmax(dim=0), rtol=0, atol=0.0075)


def test_noise_is_a_function_of_the_generator_alone() -> None:
    like = torch.zeros(10)
    torch.manual_seed(0)
    first = gumbel_noise(like, torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    assert torch.equal(first, gumbel_noise(like, torch.Generator().manual_seed(1)))
