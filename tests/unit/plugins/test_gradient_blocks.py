"""The ways to name blocks."""

import pytest
from torch import nn

from lightning_dalle.plugins.gradient_blocks import find_blocks
from tests.unit.plugins.residual_network import Body, ResidualNetwork, module


def test_the_module_names_its_blocks() -> None:
    found = find_blocks(module(), None)
    assert list(found) == ["body_0", "body_1", "body_2"]
    assert all(isinstance(parts[0], Body) for parts in found.values())


def test_a_block_may_be_several_modules_in_a_row() -> None:
    class Chained(ResidualNetwork):
        def gradient_blocks(self) -> dict[str, list[nn.Module]]:
            return {"first": [self.bodies[0].norm, self.bodies[0].fc2]}

    network = Chained(depth=2, width=4)
    assert find_blocks(network, None) == {"first": (network.bodies[0].norm, network.bodies[0].fc2)}


def test_class_and_regular_expression_find_the_same() -> None:
    network = ResidualNetwork(depth=3, width=4)
    expected = {f"bodies.{number}": (body,) for number, body in enumerate(network.bodies)}
    assert find_blocks(network, Body) == expected
    assert find_blocks(network, [Body]) == expected
    assert find_blocks(network, r"bodies\.\d+") == expected


def test_a_module_that_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match=r"ResidualNetwork has no gradient_blocks\(\); add it, or name the blocks"):
        find_blocks(ResidualNetwork(depth=1, width=4), None)


def test_no_block_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks \('layer'\) match no part of ResidualNetwork; look at named_modules"):
        find_blocks(ResidualNetwork(depth=1, width=4), "layer")


def test_blocks_inside_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the blocks bodies.0 and bodies.0.fc1 share a Linear, .*scaled twice"):
        find_blocks(ResidualNetwork(depth=1, width=4), r"bodies\.0(\.fc1)?")
