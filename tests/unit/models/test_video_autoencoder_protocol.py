import pytest
import torch

from lightning_dalle.models.video_autoencoder import PixelAutoencoder, VideoAutoencoder


def test_every_byte_comes_back_as_it_was() -> None:
    video = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 3, 4, 8, 8)
    latents = PixelAutoencoder().encode(video)
    assert (latents.shape, latents.dtype) == ((1, 3, 4, 8, 8), torch.float32)
    assert (latents.min().item(), latents.max().item()) == (-1, 1)
    assert torch.equal(PixelAutoencoder().decode(latents), video)


def test_values_outside_are_clamped_and_the_others_rounded() -> None:
    latents = torch.tensor([-3.0, 1.004, 9.0, 1 / 255]).reshape(1, 1, 4, 1, 1).expand(1, 3, 4, 1, 1)
    assert PixelAutoencoder().decode(latents)[0, 0].flatten().tolist() == [0, 255, 255, 128]


def test_latents_of_half_precision_are_decoded() -> None:
    assert PixelAutoencoder().decode(torch.ones(1, 3, 1, 1, 1, dtype=torch.bfloat16)).unique().tolist() == [255]


def test_it_is_an_autoencoder_of_any_grid() -> None:
    assert isinstance(PixelAutoencoder(), VideoAutoencoder)
    assert not isinstance(object(), VideoAutoencoder)
    assert PixelAutoencoder().latent_grid(7, 3, 5) == (7, 3, 5)


@pytest.mark.parametrize("grid", [(0, 8, 8), (8, 0, 8), (8, 8, -1)])
def test_clips_without_extent_are_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"frames \(\d+\), height \(\d+\) and width \(-?\d+\) must each be at least 1"):
        PixelAutoencoder().latent_grid(*grid)
