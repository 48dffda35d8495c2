"""The transformer: layers, causality, padding, decoding, initialisation and the paper's size."""

import dataclasses

import pytest
import torch

from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig

TINY = SparseTransformerConfig(
    depth=4,
    num_heads=2,
    head_dim=4,
    text_tokens=6,
    text_vocabulary_size=11,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=9,
    convolution_kernel_size=3,
)
TEXT_BLOCK = TINY.text_tokens + 2


def _network(config: SparseTransformerConfig = TINY) -> SparseTransformer:
    """Weights large enough that every path shows in the outputs, in float64."""
    torch.manual_seed(0)
    network = SparseTransformer(config).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


def _tokens(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, TINY.text_vocabulary_size, (batch, TINY.text_tokens), generator=generator)
    text[0, 4:] = 0
    return text, torch.randint(0, TINY.image_vocabulary_size, (batch, TINY.image_tokens), generator=generator)


def test_layer_order_is_the_paper_s() -> None:
    kinds = [SparseTransformerConfig().pattern(layer).kind for layer in range(64)]
    assert kinds[:6] == ["row", "column", "row", "row", "row", "column"]
    assert [layer + 1 for layer, kind in enumerate(kinds) if kind == "column"] == list(range(2, 64, 4))
    assert [layer + 1 for layer, kind in enumerate(kinds) if kind == "convolution"] == [64]


def test_paper_s_network_has_twelve_billion_parameters() -> None:
    config = SparseTransformerConfig()
    with torch.device("meta"):
        network = SparseTransformer(config)
    counts = {
        name: sum(parameter.numel() for parameter in module.parameters()) for name, module in network.named_children()
    }
    assert config.width == 3968
    # 12 width^2 + 13 width per layer; the paper's 12.0e9 counts these.
    assert counts["layers"] == 64 * (12 * 3968**2 + 13 * 3968) == 12_095_479_808
    assert abs(counts["layers"] / 12.0e9 - 1) < 0.01
    assert counts["text_embedding"] == 16384 * 3968
    assert counts["image_embedding"] == 8192 * 3968
    assert counts["text_head"] + counts["image_head"] == (16384 + 8192) * (3968 + 1)
    assert sum(counts.values()) == 12_292_840_960


@pytest.mark.parametrize("layer", range(TINY.depth))
def test_each_layer_is_influenced_by_exactly_what_its_mask_shows(layer: int) -> None:
    network = _network()
    pattern = TINY.pattern(layer)
    hidden = torch.randn(pattern.length, TINY.width, dtype=torch.float64)
    # Batch element p has position p perturbed.
    perturbed = hidden.repeat(pattern.length, 1, 1)
    perturbed[torch.arange(pattern.length), torch.arange(pattern.length)] += torch.randn(TINY.width)
    with torch.no_grad():
        change = network.layers[layer](perturbed) - network.layers[layer](hidden.unsqueeze(0))
    influenced = (change.abs().amax(-1) > 1e-12).T
    assert torch.equal(influenced, pattern.mask())


def test_no_logit_sees_its_own_token_or_a_later_one() -> None:
    network = _network()
    text, image = _tokens(batch=1)
    text_logits, image_logits = network(text, image)
    for index in range(TINY.text_tokens):
        changed = text.clone()
        changed[0, index] = (text[0, index] + 1) % TINY.text_vocabulary_size
        new_text_logits, new_image_logits = network(changed, image)
        torch.testing.assert_close(new_text_logits[:, : index + 1], text_logits[:, : index + 1], atol=1e-12, rtol=0)
        assert (new_image_logits - image_logits).abs().amax(-1).min() > 1e-9
    for index in range(TINY.image_tokens):
        changed = image.clone()
        changed[0, index] = (image[0, index] + 1) % TINY.image_vocabulary_size
        new_text_logits, new_image_logits = network(text, changed)
        torch.testing.assert_close(new_text_logits, text_logits, atol=1e-12, rtol=0)
        torch.testing.assert_close(new_image_logits[:, : index + 1], image_logits[:, : index + 1], atol=1e-12, rtol=0)
        if index + 1 < TINY.image_tokens:
            assert (new_image_logits[:, index + 1] - image_logits[:, index + 1]).abs().max() > 1e-9


def test_padding_is_a_learned_token_of_its_position_and_never_masked() -> None:
    network = _network()
    text, image = _tokens(batch=1)
    text_logits, image_logits = network(text, image)
    with torch.no_grad():
        network.padding_embedding.weight[5] += torch.randn(TINY.width)
        network.text_embedding.weight[0] += torch.randn(TINY.width)
    new_text_logits, new_image_logits = network(text, image)
    # Positions 4 and 5 are padding; 5 is an input of nothing but the image.
    assert torch.equal(new_text_logits, text_logits)
    assert (new_image_logits - image_logits).abs().amax(-1).min() > 1e-9


def test_forward_leaves_the_caller_s_tokens_alone() -> None:
    network = _network()
    text, image = _tokens()
    before = text.clone(), image.clone()
    network(text, image)
    network.start_decoding(text, image[:, :4])
    assert torch.equal(text, before[0])
    assert torch.equal(image, before[1])


@pytest.mark.parametrize("primed", [0, 4, 12])
def test_decoding_steps_equal_the_forward_pass(primed: int) -> None:
    network = _network()
    text, image = _tokens()
    _, expected = network(text, image)
    logits, caches = network.start_decoding(text, image[:, :primed] if primed else None)
    rest = range(primed, TINY.image_tokens - 1)
    steps = [logits, *(network.decode_step(image[:, index], caches) for index in rest)]
    torch.testing.assert_close(torch.stack(steps, dim=1), expected[:, primed:], atol=1e-11, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_identical_gradients(dropout: float) -> None:
    text, image = _tokens()
    gradients = []
    for checkpointing in (False, True):
        config = dataclasses.replace(TINY, activation_checkpointing=checkpointing, attention_dropout=dropout)
        network = _network(config)
        text_logits, image_logits = network(text, image)
        (text_logits.square().mean() + image_logits.square().mean()).backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_activation_checkpointing_keeps_fewer_bytes() -> None:
    text, image = _tokens()
    saved = []
    for checkpointing in (False, True):
        network = _network(dataclasses.replace(TINY, activation_checkpointing=checkpointing))
        sizes: list[int] = []

        def measured(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(measured, lambda tensor: tensor):
            network(text, image)
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 2


def test_attention_dropout_drops_in_training_alone() -> None:
    plain, dropping = _network(), _network(dataclasses.replace(TINY, attention_dropout=0.3))
    expected, drawn, redrawn = plain(*_tokens())[1], dropping(*_tokens())[1], dropping(*_tokens())[1]
    assert not torch.equal(drawn, expected)
    assert not torch.equal(drawn, redrawn)
    assert torch.equal(dropping.eval()(*_tokens())[1], expected)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    with pytest.raises(ValueError, match=rf"attention_dropout \({dropout}\) must be in \[0, 1\)"):
        dataclasses.replace(TINY, attention_dropout=dropout)


def test_initialisation_scales_what_ends_a_residual_block() -> None:
    torch.manual_seed(0)
    network = SparseTransformer(dataclasses.replace(TINY, depth=8, num_heads=4, head_dim=32))
    layer = network.layers[3]
    for weight, expected in (
        (network.image_embedding.weight, 0.02),
        (network.padding_embedding.weight, 0.02),
        (layer.attention.query_key_value.weight, 0.02),
        (layer.attention.output.weight, 0.005),
        (layer.fc2.weight, 0.005),
    ):
        # Five standard errors of a standard deviation, 1 / sqrt(2 n).
        assert weight.std().item() == pytest.approx(expected, rel=5 / (2 * weight.numel()) ** 0.5)
    assert layer.fc1.bias.abs().max() == 0
    assert torch.equal(network.final_norm.weight, torch.ones(128))


def test_network_trains_under_bfloat16_autocast() -> None:
    network = SparseTransformer(TINY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text_logits, image_logits = network(*_tokens())
    (text_logits.float().mean() + image_logits.float().mean()).backward()
    assert image_logits.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in network.parameters())


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TINY) if f.type is int])
def test_size_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} \(0\) must be at least 1"):
        SparseTransformerConfig(**{**dataclasses.asdict(TINY), name: 0})


def test_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"convolution_kernel_size \(4\) must be odd"):
        dataclasses.replace(TINY, convolution_kernel_size=4)


def test_wrong_number_of_tokens_is_refused_by_name() -> None:
    network = _network()
    text, image = _tokens()
    with pytest.raises(ValueError, match=r"text_tokens has shape \(2, 5\)"):
        network(text[:, :5], image)
    with pytest.raises(ValueError, match=r"image_tokens has shape \(2, 15\)"):
        network(text, image[:, :15])
    with pytest.raises(ValueError, match=r"text_tokens has shape \(2, 5\)"):
        network.start_decoding(text[:, :5])


@pytest.mark.parametrize("primed", [3, 16])
def test_prime_of_wrong_size_is_refused(primed: int) -> None:
    text, image = _tokens()
    with pytest.raises(ValueError, match=f"prime_tokens has {primed} tokens; it must be complete rows of 4, at most 3"):
        _network().start_decoding(text, image[:, :primed])
