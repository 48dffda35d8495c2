import pytest
import torch

from lightning_dalle.lightning_modules.text_to_image_training import ImageTokenCache
from lightning_dalle.models.discrete_vae import DiscreteVAE
from tests.unit.lightning_modules.tiny_text_to_image import VAE, images, tiny_module


class CountingDiscreteVAE(DiscreteVAE):
    """Counts the images that are encoded."""

    num_encoded = 0

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        self.num_encoded += len(images)
        return super().encode(images)


@pytest.fixture
def discrete_vae() -> CountingDiscreteVAE:
    torch.manual_seed(0)
    return CountingDiscreteVAE(VAE)


@pytest.mark.parametrize(("capacity", "num_encoded"), [(0, 12), (2, 8), (4, 4), (100, 4)])
def test_kept_tokens_are_those_of_the_network(
    discrete_vae: CountingDiscreteVAE, capacity: int, num_encoded: int
) -> None:
    cache, pictures = ImageTokenCache(capacity), images(4)
    for order in ([0, 1, 2, 3], [3, 1, 2, 0], [2, 2, 1, 0]):
        expected = DiscreteVAE.encode(discrete_vae, pictures[order])
        assert torch.equal(cache.encode(discrete_vae, pictures[order]), expected)
    # The last order has one picture twice and one not at all: the count of the second and third passes is the same.
    assert discrete_vae.num_encoded == num_encoded


def test_pictures_that_differ_in_one_value_are_told_apart(discrete_vae: CountingDiscreteVAE) -> None:
    cache, picture = ImageTokenCache(10), images(1)
    changed = picture.clone()
    changed[0, 0, 0, 0] += 1
    cache.encode(discrete_vae, picture)
    cache.encode(discrete_vae, changed)
    assert discrete_vae.num_encoded == 2


def test_the_cache_changes_neither_the_checkpoint_nor_the_tokens() -> None:
    batch = {"image": images(), "caption": ["a red diamond", "a blue square", "two green stars"]}
    plain, keeping = tiny_module(), tiny_module(training={"schedule": {"warmup_steps": 2}, "kept_image_tokens": 8})
    assert plain.state_dict().keys() == keeping.state_dict().keys()
    for _ in range(2):
        assert torch.equal(plain._image_tokens(batch), keeping._image_tokens(batch))


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capacity \(-1\) must be at least 0"):
        ImageTokenCache(-1)
