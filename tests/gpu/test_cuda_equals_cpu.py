"""Both networks, attention and generation on a CUDA device against the CPU; all of it is skipped where there is none.

In double precision, so that the tolerance says something about the code and nothing about the device's fast paths.
"""

import copy
import functools
import os
from typing import TypeVar, get_args

import pytest
import torch
from torch import Tensor, nn

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind

# Another device can be named to try the tests themselves where there is no CUDA.
DEVICE = os.environ.get("LIGHTNING_DALLE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
VAE = DiscreteVAEConfig(image_size=16, codebook_size=12, hidden_width=8, num_groups=3, decoder_input_width=8)
TRANSFORMER = SparseTransformerConfig(
    depth=4,
    num_heads=2,
    head_dim=8,
    text_tokens=6,
    text_vocabulary_size=300,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=12,
    convolution_kernel_size=3,
)


Network = TypeVar("Network", bound=nn.Module)


def on_device(network: Network) -> Network:
    return copy.deepcopy(network).to(DEVICE)


def assert_same_gradients(reference: nn.Module, other: nn.Module) -> None:
    for (name, parameter), counterpart in zip(reference.named_parameters(), other.parameters(), strict=True):
        if parameter.grad is not None:
            assert counterpart.grad is not None, name
            assert_close(counterpart.grad.cpu(), parameter.grad, msg=name)


def vae_loss(network: DiscreteVAE, images: Tensor) -> Tensor:
    mu, log_scale = network.decode_maps(network.encode_logits(images).softmax(dim=1))
    return (mu.square() + log_scale.square()).mean()


def transformer_loss(network: SparseTransformer, text: Tensor, image: Tensor) -> Tensor:
    return sum((logits.square().mean() for logits in network(text, image)), torch.zeros((), device=text.device))


def test_discrete_vae_and_its_gradients() -> None:
    torch.manual_seed(0)
    network = DiscreteVAE(VAE).double()
    images = torch.rand(2, 3, VAE.image_size, VAE.image_size, dtype=torch.float64)
    twin = on_device(network)
    loss, other = vae_loss(network, images), vae_loss(twin, images.to(DEVICE))
    assert_close(other.cpu(), loss)
    loss.backward()
    other.backward()
    assert_same_gradients(network, twin)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_sparse_transformer_and_its_gradients(activation_checkpointing: bool) -> None:
    torch.manual_seed(0)
    settings = {**vars(TRANSFORMER), "activation_checkpointing": activation_checkpointing}
    network = SparseTransformer(SparseTransformerConfig(**settings)).double()
    text = torch.randint(0, TRANSFORMER.text_vocabulary_size, (2, TRANSFORMER.text_tokens))
    image = torch.randint(0, TRANSFORMER.image_vocabulary_size, (2, TRANSFORMER.image_tokens))
    twin = on_device(network)
    loss = transformer_loss(network, text, image)
    other = transformer_loss(twin, text.to(DEVICE), image.to(DEVICE))
    assert_close(other.cpu(), loss)
    loss.backward()
    other.backward()
    assert_same_gradients(network, twin)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", get_args(PatternKind))
def test_attention_and_its_gradients(kind: PatternKind, dropout: float) -> None:
    pattern = AttentionPattern(kind, 70, 15, 13, 5)
    inputs = torch.randn(3, 2, 3, pattern.length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs, gradients = [], []
    for device in ("cpu", DEVICE):
        leaf = inputs.to(device).requires_grad_()
        query, key, value = leaf.unbind(0)
        outputs.append(attend(query, key, value, pattern, dropout=dropout, dropout_seed=5))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), leaf)[0])
    assert_close(outputs[1].cpu(), outputs[0])
    assert_close(gradients[1].cpu(), gradients[0])


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_generated_images(guidance_scale: float) -> None:
    torch.manual_seed(0)
    captions = ["a small red diamond", "a large blue square"]
    tokenizer = CaptionTokenizer.train(captions, vocabulary_size=TRANSFORMER.text_vocabulary_size)
    training = {"caption_dropout": 0.1}
    module = TextToImageModule(TRANSFORMER, training, DiscreteVAE(VAE), tokenizer.to_json()).double().eval()
    images = [
        version.generate(
            captions,
            num_candidates=3,
            guidance_scale=guidance_scale,
            generator=torch.Generator().manual_seed(7),
            progress=False,
        ).cpu()
        for version in (module, copy.deepcopy(module).to(DEVICE))
    ]
    # Rounding to grey levels may fall on either side.
    assert (images[0].int() - images[1].int()).abs().max() <= 1
