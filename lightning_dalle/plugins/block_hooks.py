"""What happens at the borders of one block: autocast, scaled gradients, biases in 32 bits."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_dalle.ops.gradient_scaling import Scale, scale_output, unscale_input, unscale_parameter


def next_node_number() -> int:
    """Return the number that autograd gives to the node that it makes next in this thread."""
    return torch.autograd._get_sequence_nr()


def holds_reentrant_checkpoint(output: Tensor, first_number: int) -> bool:
    """Return whether a checkpoint with `use_reentrant=True` is among the nodes of a graph from a number on.

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


_WITH_BIAS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class BlockHooks:
    """Runs the modules of a block in a 16-bit type, with gradients that are scaled inside it and nowhere else.

    Forward hooks, so that a recomputation of activations passes through them as well. While a module of the block runs,
    its parameters are replaced by unscaling views; their use anywhere else is not touched.

    Args:
        parts: Modules that run one after another.
        scale: Scale of the gradient inside the block.
        dtype: Dtype of the block's body at the time; float32 is no autocast.
    """

    def __init__(self, parts: tuple[nn.Module, ...], scale: Scale, dtype: Callable[[], torch.dtype]) -> None:
        self.scale, self.dtype = scale, dtype
        self._name = " and ".join(type(part).__name__ for part in parts)
        self._open: list[ExitStack] = []
        self._first_node = 0
        self._biases: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        for place, part in enumerate(parts):
            # Flags instead of a look at the module, which in a copy is another one.
            is_first, is_last = place == 0, place == len(parts) - 1
            self._attach(part, partial(self._before_part, is_first), partial(self._after_part, is_last))
        for module in {inner: None for part in parts for inner in part.modules()}:
            # Other classes, and those derived from these, may use their bias in ways of their own.
            if type(module) in _WITH_BIAS and module.bias is not None:
                self._attach(module, self._before_bias, self._after_bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockHooks":
        """Return the same hooks: a copied module, as averaging of weights makes one, is scaled like the original."""
        return self

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        # After the work of a sharded module is begun and before it is ended, since that replaces parameters too.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def _before_part(self, is_first: bool, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        stack = ExitStack()
        self._open.append(stack)
        if is_first:
            self._first_node = next_node_number()
        dtype = self.dtype()
        if dtype != torch.float32:
            tensors = (tensor for tensor in (*module.parameters(), *args) if isinstance(tensor, Tensor))
            device_type = next((tensor.device.type for tensor in tensors), "cpu")
            # Weights come as views, which the cache does not know.
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        if torch.is_grad_enabled():
            self._replace_parameters(module, stack)
        return tree_map_only(Tensor, self._enter, (args, kwargs)) if is_first else None

    def _after_part(self, is_last: bool, module: nn.Module, args: Any, output: Any) -> Any:
        # Without an open part, the call failed before it began.
        if self._open:
            self._open.pop().close()
        return tree_map_only(Tensor, self._leave, output) if is_last and output is not None else None

    def _replace_parameters(self, module: nn.Module, stack: ExitStack) -> None:
        views: dict[Tensor, Tensor] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    raise TypeError(
                        f"the parameter {name} of {type(owner).__name__} is {parameter.dtype}, where its gradient "
                        "would be lost once it is unscaled; keep parameters in float32, blocks cast them by themselves"
                    )
                if parameter not in views:
                    views[parameter] = unscale_parameter(parameter, self.scale)
                owner._parameters[name] = views[parameter]  # type: ignore[assignment]
                stack.callback(owner._parameters.__setitem__, name, parameter)

    def _before_bias(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        bias = module._parameters["bias"]
        assert bias is not None
        self._biases.append(bias)
        module._parameters["bias"] = None

    def _after_bias(self, module: Any, args: Any, output: Tensor | None) -> Tensor | None:
        if not self._biases:
            return None
        bias = module._parameters["bias"] = self._biases.pop()
        if output is None:
            return None
        # Channels stand before the places of a convolution.
        places = () if isinstance(module, nn.Linear) else (1,) * len(module.kernel_size)
        return (output + bias.view(-1, *places)).to(output.dtype)

    def _enter(self, tensor: Tensor) -> Tensor:
        return unscale_input(tensor, self.scale) if tensor.requires_grad and torch.is_grad_enabled() else tensor

    def _leave(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            if holds_reentrant_checkpoint(tensor, self._first_node):
                raise RuntimeError(
                    f"the block of {self._name} checkpoints activations with use_reentrant=True, which would compute "
                    "them again without its gradient scale; checkpoint with use_reentrant=False, or around the block"
                )
            return scale_output(tensor, self.scale)
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
