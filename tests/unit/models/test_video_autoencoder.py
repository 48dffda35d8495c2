import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor

from lightning_dalle.models.video_autoencoder import (
    CausalBlock,
    CausalVideoAutoencoder,
    CausalVideoAutoencoderConfig,
    VideoAutoencoder,
)


def network_of(time_compression: int = 4, space_compression: int = 4, seed: int = 0) -> CausalVideoAutoencoder:
    """Random in every weight, those that start at zero included."""
    torch.manual_seed(seed)
    network = CausalVideoAutoencoder(
        CausalVideoAutoencoderConfig(
            time_compression=time_compression, space_compression=space_compression, latent_channels=3, hidden_width=4
        )
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network.double()


def random_video(frames: int, height: int = 8, width: int = 8, batch: int = 1) -> Tensor:
    shape = (batch, 3, frames, height, width)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@settings(max_examples=25, deadline=None)
@given(
    strategies.sampled_from([1, 2, 4]),
    strategies.sampled_from([1, 2, 4]),
    strategies.integers(0, 3),
    strategies.integers(1, 3),
    strategies.integers(1, 3),
)
def test_latents_have_the_grid_that_is_said_and_decode_to_the_size_of_the_clip(
    time_compression: int, space_compression: int, groups: int, rows: int, columns: int
) -> None:
    network = network_of(time_compression, space_compression).float()
    shape = (1 + groups * time_compression, rows * space_compression, columns * space_compression)
    latents = network.encode(random_video(*shape))
    assert tuple(latents.shape) == (1, 3, *network.latent_grid(*shape)) == (1, 3, 1 + groups, rows, columns)
    assert network.decode(latents).shape == (1, 3, *shape)
    assert network.decode(latents).dtype == torch.uint8


@pytest.mark.parametrize("time_compression", [2, 4])
def test_a_changed_frame_changes_its_latent_and_later_ones_only(time_compression: int) -> None:
    network = network_of(time_compression)
    pixels = torch.rand(1, 3, 1 + 3 * time_compression, 8, 8, dtype=torch.float64) * 2 - 1
    before = network.encode_pixels(pixels)
    for frame in range(pixels.shape[2]):
        changed = pixels.clone()
        changed[:, :, frame] += 0.5
        moved = (network.encode_pixels(changed) - before).abs().amax(dim=(0, 1, 3, 4)) > 1e-9
        own = -(-frame // time_compression)
        assert not moved[:own].any()
        assert moved[own]


@pytest.mark.parametrize("time_compression", [2, 4])
def test_a_changed_latent_changes_its_frames_and_later_ones_only(time_compression: int) -> None:
    network = network_of(time_compression)
    latents = network.encode_pixels(torch.rand(1, 3, 1 + 3 * time_compression, 8, 8, dtype=torch.float64) * 2 - 1)
    before = network.decode_pixels(latents)
    for place in range(4):
        changed = latents.clone()
        changed[:, :, place] = changed[:, [2, 0, 1], place]
        moved = (network.decode_pixels(changed) - before).abs().amax(dim=(0, 1, 3, 4)) > 1e-9
        first = 0 if place == 0 else 1 + (place - 1) * time_compression
        assert not moved[:first].any()
        assert moved[first : first + (1 if place == 0 else time_compression)].all()


def test_the_start_of_a_clip_is_encoded_as_a_clip_of_its_own() -> None:
    network = network_of()
    video = random_video(9, batch=2)
    whole = network.double().encode_pixels(video.double() / 127.5 - 1)
    for frames in (1, 5):
        alone = network.encode_pixels(video[:, :, :frames].double() / 127.5 - 1)
        torch.testing.assert_close(alone, whole[:, :, : alone.shape[2]], rtol=0, atol=1e-12)


def test_latents_have_a_mean_square_of_one_and_decode_alike_at_any_scale() -> None:
    network = network_of().float()
    latents = network.encode(random_video(5))
    torch.testing.assert_close(latents.square().mean(dim=1), torch.ones(1, 2, 2, 2), rtol=0, atol=1e-3)
    assert (network.decode(latents).int() - network.decode(latents * 1.7).int()).abs().max() <= 1


def test_it_is_a_video_autoencoder() -> None:
    network = network_of()
    assert isinstance(network, VideoAutoencoder)
    assert network.latent_channels == 3
    assert not network.float().encode(random_video(1)).requires_grad


def test_gradients_reach_every_parameter() -> None:
    network = network_of()
    pixels = torch.rand(1, 3, 5, 8, 8, dtype=torch.float64) * 2 - 1
    network.decode_pixels(network.encode_pixels(pixels)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((8, 8, 8), r"frames \(8\) must be 1 more than a multiple of time_compression \(4\).*; take 5 or 9"),
        ((3, 8, 8), r"frames \(3\) .* the first frame is kept alone; take 1 or 5"),
        ((0, 8, 8), r"frames \(0\) .*; take 1 or 5"),
        ((5, 10, 8), r"height \(10\) must be a positive multiple of space_compression \(4\)"),
        ((5, 8, 6), r"width \(6\) must be a positive multiple of space_compression \(4\)"),
    ],
)
def test_clips_that_the_compression_does_not_take_are_refused(shape: tuple[int, int, int], message: str) -> None:
    network = network_of().float()
    with pytest.raises(ValueError, match=message):
        network.latent_grid(*shape)
    if shape[0]:
        with pytest.raises(ValueError, match=message):
            network.encode(random_video(*shape))


@pytest.mark.parametrize("blocks_per_level", [1, 3])
def test_each_resolution_has_its_blocks_on_both_ways(blocks_per_level: int) -> None:
    config = CausalVideoAutoencoderConfig(
        time_compression=2, space_compression=4, hidden_width=4, blocks_per_level=blocks_per_level
    )
    blocks = [part for part in CausalVideoAutoencoder(config).modules() if isinstance(part, CausalBlock)]
    one_each = [
        part
        for part in CausalVideoAutoencoder(dataclasses.replace(config, blocks_per_level=1)).modules()
        if isinstance(part, CausalBlock)
    ]
    assert len(blocks) == blocks_per_level * len(one_each)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_channels": 0}, r"latent_channels \(0\) must be at least 1"),
        ({"hidden_width": -4}, r"hidden_width \(-4\) must be at least 1"),
        ({"blocks_per_level": 0}, r"blocks_per_level \(0\) must be at least 1"),
        ({"time_compression": 3}, r"time_compression \(3\) must be a power of 2"),
        ({"space_compression": 0}, r"space_compression \(0\) must be a power of 2"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalVideoAutoencoderConfig(**changes)
