"""The patch codebook: k-means as a starting point of the network."""

import dataclasses

import pytest
import torch

from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.patch_codebook import fit_patch_codebook
from lightning_dalle.ops.dvae_losses import map_pixels
from lightning_dalle.ops.k_means import k_means, nearest_centre
from tests.rounding import assert_only_rounded

CONFIG = DiscreteVAEConfig(
    image_size=16, codebook_size=16, hidden_width=8, num_groups=3, blocks_per_group=1, patch_codebook=True
)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (32, 3, 16, 16), generator=generator, dtype=torch.uint8)


def test_initialised_network_is_nearest_neighbour_quantisation(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    network = DiscreteVAE(CONFIG)
    network.initialise_patch_codebook(images, seed=3)
    patches = torch.nn.functional.pixel_unshuffle(map_pixels(images), 4).permute(0, 2, 3, 1).flatten(0, 2)
    generator = torch.Generator().manual_seed(3)
    distinct = patches.unique(dim=0)
    centres = k_means(distinct[torch.randperm(len(distinct), generator=generator)], 16, iterations=15, seed=3)
    nearest = nearest_centre(patches, centres)
    assert torch.equal(network.encode(images).flatten(), nearest)
    mu, _ = network.decode_maps(nearest.view(32, 4, 4))
    quantised = torch.nn.functional.pixel_shuffle(centres[nearest].view(32, 4, 4, 48).permute(0, 3, 1, 2), 4)
    assert_only_rounded(mu.sigmoid(), quantised.logit().sigmoid(), quantised.double())


@pytest.mark.parametrize("min_log_scale", [None, -1.5])
def test_initial_log_scale_maximises_the_density(images: torch.Tensor, min_log_scale: float | None) -> None:
    network = DiscreteVAE(dataclasses.replace(CONFIG, min_log_scale=min_log_scale))
    network.initialise_patch_codebook(images)
    mu, log_scale = network.decode_maps(network.encode(images).view(32, 4, 4))
    deviation = (map_pixels(images).logit() - mu).abs().mean()
    torch.testing.assert_close(log_scale.flatten()[0].exp(), deviation)


def test_initial_log_scale_below_its_floor_starts_near_it(images: torch.Tensor) -> None:
    network = DiscreteVAE(dataclasses.replace(CONFIG, min_log_scale=2.0))
    network.initialise_patch_codebook(images)
    _, log_scale = network.decode_maps(network.encode(images).view(32, 4, 4))
    torch.testing.assert_close(log_scale, torch.full_like(log_scale, 2.05))


def test_initialisation_depends_on_images_and_seed_alone(images: torch.Tensor) -> None:
    tables = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        tables.append(fit_patch_codebook(map_pixels(images), 16, 4, temperature=1.0, seed=5).decoder_weight)
    other = fit_patch_codebook(map_pixels(images), 16, 4, temperature=1.0, seed=6).decoder_weight
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], other)


def test_equal_patches_weigh_as_often_as_they_come(images: torch.Tensor) -> None:
    white = torch.full((len(images), 3, 16, 16), 255, dtype=torch.uint8)
    padded = torch.cat([images, white])
    plain, with_white = (fit_patch_codebook(map_pixels(x), 16, 4, temperature=1.0, seed=0) for x in (images, padded))
    # Half of the patches are reproduced without error, which halves the mean error.
    assert with_white.log_scale < plain.log_scale
    patches = with_white.decoder_weight.sigmoid()
    assert (patches - map_pixels(white)[0, 0, 0, 0]).abs().amax(dim=(1, 2, 3)).min() < 1e-5


def test_temperature_divides_the_logits(images: torch.Tensor) -> None:
    cold, warm = (fit_patch_codebook(map_pixels(images), 16, 4, temperature=t, seed=0) for t in (1.0, 2.0))
    torch.testing.assert_close(cold.encoder_weight, 2 * warm.encoder_weight)
    torch.testing.assert_close(cold.encoder_bias, 2 * warm.encoder_bias)


def test_hard_codes_decode_like_their_one_hot(images: torch.Tensor) -> None:
    network = DiscreteVAE(CONFIG)
    network.initialise_patch_codebook(images)
    ids = network.encode(images).view(32, 4, 4)
    one_hot = torch.nn.functional.one_hot(ids, 16).permute(0, 3, 1, 2).float()
    for from_ids, from_one_hot in zip(network.decode_maps(ids), network.decode_maps(one_hot), strict=True):
        torch.testing.assert_close(from_ids, from_one_hot)


def test_codebook_is_trained_with_everything_else(images: torch.Tensor) -> None:
    network = DiscreteVAE(CONFIG)
    network.initialise_patch_codebook(images)
    logits = network.encode_logits(map_pixels(images))
    mu, log_scale = network.decode_maps(logits.softmax(dim=1))
    (mu.square().sum() + log_scale.square().sum()).backward()
    for name in ("encoder.patch.w", "encoder.patch.b", "decoder.patch.w", "encoder.blocks.output.conv.w"):
        assert network.get_parameter(name).grad.abs().sum() > 0, name


def test_network_says_whether_it_needs_the_initialisation(images: torch.Tensor) -> None:
    network = DiscreteVAE(CONFIG)
    assert network.needs_patch_codebook
    network.initialise_patch_codebook(images)
    assert not network.needs_patch_codebook


def test_network_without_the_option_refuses_the_initialisation(images: torch.Tensor) -> None:
    network = DiscreteVAE(DiscreteVAEConfig(image_size=16, codebook_size=16, hidden_width=8, num_groups=3))
    assert not network.needs_patch_codebook
    with pytest.raises(ValueError, match=r"patch_codebook \(False\) must be True"):
        network.initialise_patch_codebook(images)
