"""The discrete VAE: sizes, shapes, precision and errors."""

import pytest
import torch

from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.ops.dvae_losses import map_pixels

TINY = DiscreteVAEConfig(image_size=16, codebook_size=12, hidden_width=8, num_groups=3, decoder_input_width=6)


@pytest.fixture(scope="module")
def network() -> DiscreteVAE:
    torch.manual_seed(0)
    return DiscreteVAE(TINY)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_default_sizes_have_the_released_parameter_counts() -> None:
    with torch.device("meta"):
        network = DiscreteVAE(DiscreteVAEConfig())
    counts = [[p.numel() for p in part.parameters()] for part in (network.encoder, network.decoder)]
    assert [(sum(sizes), len(sizes)) for sizes in counts] == [(53_786_240, 74), (43_829_766, 76)]
    assert all(parameter.is_meta for parameter in network.parameters())


@pytest.mark.parametrize(
    ("num_groups", "blocks_per_group", "hidden_width", "image_size"), [(1, 1, 4, 5), (2, 3, 12, 6), (4, 1, 8, 24)]
)
def test_any_width_depth_and_resolution(
    num_groups: int, blocks_per_group: int, hidden_width: int, image_size: int
) -> None:
    config = DiscreteVAEConfig(
        image_size=image_size,
        codebook_size=7,
        hidden_width=hidden_width,
        num_groups=num_groups,
        blocks_per_group=blocks_per_group,
    )
    network = DiscreteVAE(config)
    ids = network.encode(torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8))
    assert ids.shape == (2, config.image_tokens) == (2, (image_size // 2 ** (num_groups - 1)) ** 2)
    assert network.decode(ids).shape == (2, 3, image_size, image_size)


def test_weights_start_with_the_fan_in_variance(network: DiscreteVAE) -> None:
    weight = DiscreteVAE(DiscreteVAEConfig(hidden_width=64, image_size=8, codebook_size=16)).encoder.blocks.input
    # 9,408 values: the standard deviation is known to about 1 / sqrt(2 * 9408), 0.7 percent.
    assert weight.w.std().item() == pytest.approx((3 * 49) ** -0.5, rel=0.03)
    assert not weight.b.any()


def test_bytes_and_floats_encode_alike(network: DiscreteVAE, images: torch.Tensor) -> None:
    before = images.clone()
    assert torch.equal(network.encode(images), network.encode(images.float() / 255))
    assert torch.equal(images, before)


def test_encode_is_the_raster_order_argmax(network: DiscreteVAE, images: torch.Tensor) -> None:
    logits = network.encode_logits(map_pixels(images))
    assert network.encode(images)[1, 4 * 2 + 3] == logits[1, :, 2, 3].argmax()


def test_decode_is_the_sigmoid_of_mu_mapped_back(network: DiscreteVAE) -> None:
    ids = torch.arange(16).remainder(12).view(1, 16)
    mu, _ = network.decode_maps(ids.view(1, 4, 4))
    expected = ((mu.sigmoid() - 0.1) / 0.8).clamp(0, 1) * 255
    assert network.decode(ids).dtype == torch.uint8
    assert (network.decode(ids).float() - expected).abs().max() <= 0.5


def test_hard_codes_decode_like_their_one_hot(network: DiscreteVAE) -> None:
    ids = torch.arange(16).remainder(12).view(1, 4, 4)
    one_hot = torch.nn.functional.one_hot(ids, 12).permute(0, 3, 1, 2).float().contiguous()
    for from_ids, from_one_hot in zip(network.decode_maps(ids), network.decode_maps(one_hot), strict=True):
        assert torch.equal(from_ids, from_one_hot)


def test_log_scale_stays_above_its_floor_and_keeps_a_gradient(network: DiscreteVAE) -> None:
    floored = DiscreteVAE(DiscreteVAEConfig(**{**vars(TINY), "min_log_scale": -1.0}))
    floored.load_state_dict(network.state_dict())
    with torch.no_grad():
        floored.decoder.blocks.output.conv.b[3:] = -10
    _, log_scale = floored.decode_maps(torch.zeros(1, 4, 4, dtype=torch.int64))
    log_scale.sum().backward()
    assert (log_scale >= -1).all()
    assert (floored.decoder.blocks.output.conv.b.grad[3:] > 0).all()


def test_layers_next_to_the_codes_stay_in_full_precision_under_autocast(
    network: DiscreteVAE, images: torch.Tensor
) -> None:
    dtypes: dict[str, torch.dtype] = {}
    convolutions = {
        "encoder input": network.encoder.blocks.input,
        "encoder output": network.encoder.blocks.output.conv,
        "decoder input": network.decoder.blocks.input,
        "decoder output": network.decoder.blocks.output.conv,
    }
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: dtypes.update({name: output.dtype}))
        for name, module in convolutions.items()
    ]
    with torch.autocast("cpu", torch.bfloat16):
        mu, log_scale = network.decode_maps(network.encode_logits(map_pixels(images)).softmax(dim=1))
    for hook in hooks:
        hook.remove()
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"encoder output", "decoder input"}
    assert mu.dtype == log_scale.dtype == torch.float32


def test_gradients_reach_every_parameter(images: torch.Tensor) -> None:
    network = DiscreteVAE(TINY)
    mu, log_scale = network.decode_maps(network.encode_logits(map_pixels(images)).softmax(dim=1))
    (mu.square().sum() + log_scale.square().sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_size": 0}, r"codebook_size \(0\) must be at least 1"),
        ({"blocks_per_group": 0}, r"blocks_per_group \(0\) must be at least 1"),
        ({"hidden_width": 10}, r"hidden_width \(10\) must be a multiple of 4.*take 12"),
        ({"image_size": 18}, r"image_size \(18\) must be a positive multiple of the stride 4.*num_groups \(3\)"),
        ({"image_size": 0}, r"image_size \(0\) must be a positive multiple"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiscreteVAEConfig(**{**vars(TINY), **changes})


def test_images_of_another_size_are_refused(network: DiscreteVAE) -> None:
    with pytest.raises(ValueError, match=r"images \(1, 3, 8, 16\) must have shape \(batch, 3, 16, 16\)"):
        network.encode(torch.zeros(1, 3, 8, 16))


def test_codes_of_another_grid_are_refused(network: DiscreteVAE) -> None:
    with pytest.raises(ValueError, match=r"ids \(1, 15\) must have shape \(batch, 16\), the 4 x 4 grid"):
        network.decode(torch.zeros(1, 15, dtype=torch.int64))
