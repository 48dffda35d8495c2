"""One block in 16 bits against the same function in float64."""

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dalle.models.sparse_transformer import SparseTransformer
from lightning_dalle.plugins.block_hooks import BlockHooks
from tests.rounding import assert_only_rounded
from tests.unit.lightning_modules.tiny_text_to_image import NETWORK
from tests.unit.plugins.residual_network import Body, ResidualNetwork

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def attach(network: ResidualNetwork, dtype: torch.dtype = torch.float16, scale: float = 3000.0) -> list[BlockHooks]:
    return [BlockHooks((body,), lambda: scale, lambda: dtype) for body in network.bodies]


def network(depth: int = 3, width: int = 16) -> ResidualNetwork:
    torch.manual_seed(0)
    return ResidualNetwork(depth, width)


def inputs() -> Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad.double() for name, parameter in module.named_parameters()}


def assert_near(ours: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, roundings: float = 4) -> None:
    """Within a few roundings of the type, as a share of each tensor's norm; a wrong scale is off by thousands."""
    for name, gradient in expected.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < roundings * torch.finfo(dtype).eps, (name, error)


@DTYPES
@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["ordinary", "tiny"])
def test_gradients_are_those_of_float64(dtype: torch.dtype, size: float) -> None:
    """Also where they are below what float16 can hold, which is what the scale is for."""
    plain = network()
    reference = copy.deepcopy(plain).double()
    expected = gradients(reference, size * reference(inputs().double()).square().mean())
    attach(plain, dtype, scale=3000.0 / size)
    assert_near(gradients(plain, size * plain(inputs()).square().mean()), expected, dtype)


def test_without_a_scale_tiny_gradients_are_lost() -> None:
    plain = network()
    attach(plain, scale=1.0)
    found = gradients(plain, 1e-6 * plain(inputs()).square().mean())
    assert (found["bodies.0.fc1.weight"] == 0).double().mean() > 0.5
    assert (found["embed.weight"] != 0).all()


def test_bodies_run_in_16_bits_and_everything_else_in_32() -> None:
    plain = network(depth=1)
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def look(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, args, output: seen.update({name: (args[0].dtype, output.dtype)}))

    look("fc1", plain.bodies[0].fc1)
    look("norm", plain.bodies[0].norm)
    attach(plain)
    look("body", plain.bodies[0])
    look("head", plain.head)
    plain(inputs())
    wide, narrow = torch.float32, torch.float16
    # What a hook sees of `fc1` that was there first is after the bias was added.
    assert seen == {"norm": (wide, wide), "fc1": (wide, narrow), "body": (wide, wide), "head": (wide, wide)}
    assert not torch.is_autocast_enabled("cpu")


def test_a_bias_and_its_gradient_are_in_32_bits() -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    BlockHooks((layer,), lambda: 1.0, lambda: torch.float16)
    # 4097 ones do not fit into float16's eleven bits.
    layer(torch.ones(4097, 4)).sum().backward()
    assert layer.bias.grad.tolist() == [4097.0] * 3


def test_a_derived_layer_uses_its_bias_as_it_likes() -> None:
    class Twice(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return 2 * (values @ self.weight.T + self.bias)

    layer = Twice(4, 3)
    exact = copy.deepcopy(layer).double()(torch.ones(2, 4).double())
    plain = copy.deepcopy(layer).bfloat16()(torch.ones(2, 4).bfloat16())
    BlockHooks((layer,), lambda: 1.0, lambda: torch.bfloat16)
    assert_only_rounded(layer(torch.ones(2, 4)), plain, exact)


@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8)], ids=["batched", "unbatched"])
def test_a_convolution_adds_its_bias_to_channels(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv1d(3, 5, 3)
    images = torch.randn(shape)
    exact = copy.deepcopy(layer).double()(images.double())
    plain = copy.deepcopy(layer).bfloat16()(images.bfloat16())
    BlockHooks((layer,), lambda: 1.0, lambda: torch.bfloat16)
    assert_only_rounded(layer(images), plain, exact)


def test_an_overflow_stays_in_its_block() -> None:
    plain = network()
    hooks = attach(plain)
    hooks[1].scale = lambda: 1e9
    found = gradients(plain, plain(inputs()).square().mean())
    finite = {name: bool(gradient.isfinite().all()) for name, gradient in found.items()}
    assert not finite["bodies.1.fc2.weight"]
    assert all(is_finite for name, is_finite in finite.items() if not name.startswith("bodies.1."))


def test_a_parameter_used_elsewhere_is_not_divided_there() -> None:
    """As a penalty on weights uses it, or a tied head; so do two blocks with one weight."""
    plain = network()
    plain.bodies[1].fc1.weight = plain.bodies[0].fc1.weight

    def loss(module: ResidualNetwork, values: Tensor) -> Tensor:
        penalty = module.bodies[0].fc1.weight.square().sum()
        return module(values).square().mean() + penalty

    reference = copy.deepcopy(plain).double()
    expected = gradients(reference, loss(reference, inputs().double()))
    for number, hooks in enumerate(attach(plain)):
        hooks.scale = partial(float, 10.0 ** (number + 1))
    assert_near(gradients(plain, loss(plain, inputs())), expected, torch.float16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_blocks_changes_nothing(reentrant: bool) -> None:
    plain = network()
    attach(plain)
    expected = gradients(plain, plain(inputs()).square().mean())

    def forward(values: Tensor) -> Tensor:
        hidden = plain.embed(values)
        for body in plain.bodies:
            hidden = checkpoint(lambda state, body=body: state + body(state), hidden, use_reentrant=reentrant)
        return plain.head(hidden)

    found = gradients(plain, forward(inputs()).square().mean())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert not torch.is_autocast_enabled("cpu")


class CheckpointedBody(Body):
    reentrant = False

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


def checkpointed_network(depth: int = 3) -> ResidualNetwork:
    checkpointed = network(depth)
    for body in checkpointed.bodies:
        body.__class__ = CheckpointedBody
    return checkpointed


def test_checkpointing_inside_a_block_changes_nothing() -> None:
    plain, checkpointed = network(), checkpointed_network()
    for version in (plain, checkpointed):
        attach(version)
    expected = gradients(plain, plain(inputs()).square().mean())
    found = gradients(checkpointed, checkpointed(inputs()).square().mean())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_reentrant_checkpointing_inside_a_block_is_refused() -> None:
    """Its parameters' gradients would come out multiplied by the scale."""
    refused = checkpointed_network()
    attach(refused)
    refused.bodies[1].reentrant = True
    with pytest.raises(RuntimeError, match=r"block of CheckpointedBody .* use_reentrant=True.*use_reentrant=False"):
        refused(inputs())
    assert not torch.is_autocast_enabled("cpu")


def test_reentrant_checkpointing_before_a_block_is_not_the_block_s() -> None:
    """Also where it comes in by another way than the block's inputs."""
    before, after = checkpointed_network(depth=1), network(depth=1)
    before.bodies[0].reentrant = True
    attach(after)
    context = before.bodies[0](torch.ones(1, 16, requires_grad=True))
    after.bodies[0].fc1.register_forward_pre_hook(lambda _, args: args[0] + context)
    assert after(inputs()).requires_grad


def test_modules_in_a_row_are_one_block() -> None:
    whole, chained = network(depth=1), network(depth=1)
    attach(whole, scale=512.0)
    body = chained.bodies[0]
    BlockHooks((body.norm, body.fc1, body.fc2), lambda: 512.0, lambda: torch.float16)
    expected = gradients(whole, whole(inputs()).square().mean())
    found = gradients(chained, chained(inputs()).square().mean())
    # tanh is out of autocast in one and in it in the other; both run in float16.
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_gradients_of_the_text_to_image_transformer_are_those_of_float64(activation_checkpointing: bool) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(NETWORK, activation_checkpointing=activation_checkpointing)
    transformer = SparseTransformer(config)
    reference = copy.deepcopy(transformer).double()
    text, image = torch.randint(0, 280, (4, config.text_tokens)), torch.randint(0, 16, (4, config.image_tokens))
    text[:, 5:] = 0

    def loss(version: SparseTransformer) -> Tensor:
        return sum((1e-6 * logits.square().mean() for logits in version(text, image)), torch.zeros(()))

    expected = gradients(reference, loss(reference))
    for parts in transformer.gradient_blocks().values():
        BlockHooks(parts, lambda: 3e9, lambda: torch.float16)
    # The gradient of a key's bias is zero but for rounding: a softmax does not see what all keys share.
    found = gradients(transformer, loss(transformer))
    kept = {name: gradient for name, gradient in expected.items() if "query_key_value.bias" not in name}
    assert_near(found, kept, torch.float16, roundings=10)


def test_nested_inputs_and_outputs_and_what_is_no_float_pass_through() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor], *, extra: dict[str, Tensor]) -> dict[str, Any]:
            return {"out": [self.linear(pair[0]) + extra["bias"]], "index": pair[1], "none": None}

    odd = Odd()
    hooks = BlockHooks((odd,), lambda: 64.0, lambda: torch.float16)
    values, bias = torch.ones(2, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    output = odd((values, torch.arange(3)), extra={"bias": bias})
    assert (output["index"].dtype, output["none"], output["out"][0].dtype) == (torch.int64, None, torch.float32)
    output["out"][0].sum().backward()
    assert bias.grad.tolist() == [2.0] * 4
    hooks.remove()


def test_without_gradients_outputs_are_wide_too() -> None:
    plain = network(depth=1)
    attach(plain)
    with torch.no_grad():
        assert plain.bodies[0](torch.ones(2, 16)).dtype == torch.float32


def test_a_failure_inside_leaves_the_module_as_it_was() -> None:
    plain = network(depth=1)
    before = dict(plain.named_parameters())
    attach(plain)
    with pytest.raises(RuntimeError, match="shape"):
        plain.bodies[0](torch.ones(2, 17, requires_grad=True))
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter is before[name] for name, parameter in plain.named_parameters())


def test_a_copy_computes_with_its_own_weights() -> None:
    plain = network(depth=1)
    attach(plain)
    averaged = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in averaged.bodies.parameters():
            parameter.zero_()
    assert torch.equal(averaged(inputs()), averaged.head(averaged.embed(inputs())))
    assert not torch.equal(averaged(inputs()), plain(inputs()))


def test_removed_hooks_leave_nothing() -> None:
    plain = network()
    expected = plain(inputs())
    for hooks in attach(plain):
        hooks.remove()
    assert torch.equal(plain(inputs()), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_parameters_in_16_bits_are_refused() -> None:
    layer = nn.Linear(4, 4).half()
    BlockHooks((layer,), lambda: 1.0, lambda: torch.float16)
    with pytest.raises(TypeError, match=r"the parameter weight of Linear is torch.float16, .*; keep parameters"):
        layer(torch.ones(2, 4))
