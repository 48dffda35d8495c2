"""Finds activations that are checkpointed in the one way that a gradient scale cannot follow."""

import torch
from torch import Tensor
from torch.autograd.graph import Node


def next_node_number() -> int:
    """The number that autograd gives to the node that it makes next in this thread."""
    return torch.autograd._get_sequence_nr()


def holds_reentrant_checkpoint(output: Tensor, first_number: int) -> bool:
    """Whether a checkpoint with `use_reentrant=True` stands among the nodes of a tensor's graph from a number on.

    Its recomputation makes a graph of its own, in which parameters are used that were not there in the forward pass.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> values = torch.ones(3, requires_grad=True)
        >>> holds_reentrant_checkpoint(checkpoint(torch.sin, values, use_reentrant=True) + 1, 0)
        True
    """
    waiting: list[Node | None] = [output.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < first_number:
            continue
        # Libraries that have one of their own give it this name too.
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
    return False
