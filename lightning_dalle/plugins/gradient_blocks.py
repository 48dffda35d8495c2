"""Which parts of a module are blocks with a gradient scale of their own."""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

Blocks = dict[str, tuple[nn.Module, ...]]


@runtime_checkable
class HasGradientBlocks(Protocol):
    """A module that names its residual blocks."""

    def gradient_blocks(self) -> Mapping[str, nn.Module | Sequence[nn.Module]]:
        """Return the blocks by name.

        Each is a module, or the modules that run one after another from where the block leaves the identity path, first
        module, to where it is added again, last module. Plain functions between them run in the type that comes in.
        """
        ...


def find_blocks(module: nn.Module, selection: str | type[nn.Module] | Sequence[type[nn.Module]] | None) -> Blocks:
    """Return the blocks of a module by name, in its own order.

    Args:
        selection: A regular expression that the whole name of a submodule matches; a class of submodules, or several;
            None asks the module itself.

    Raises:
        TypeError: If the module is asked and cannot say.
        ValueError: If there is no block, or one lies inside another.
    """
    if selection is None:
        blocks = _declared_blocks(module)
    elif isinstance(selection, str):
        pattern = re.compile(selection)
        blocks = {name: (part,) for name, part in module.named_modules() if pattern.fullmatch(name)}
    else:
        classes = (selection,) if isinstance(selection, type) else tuple(selection)
        blocks = {name: (part,) for name, part in module.named_modules() if isinstance(part, classes)}
    if not blocks:
        raise ValueError(f"blocks ({selection!r}) match no part of {type(module).__name__}; look at named_modules()")
    _check_disjoint(blocks)
    return blocks


def _declared_blocks(module: nn.Module) -> Blocks:
    if not isinstance(module, HasGradientBlocks):
        raise TypeError(
            f"{type(module).__name__} has no gradient_blocks(); add it, or name the blocks by their class or by a "
            "regular expression: PerBlockGradientScaling(blocks=...)"
        )
    declared = module.gradient_blocks()
    return {name: (parts,) if isinstance(parts, nn.Module) else tuple(parts) for name, parts in declared.items()}


def _check_disjoint(blocks: Blocks) -> None:
    owner: dict[nn.Module, str] = {}
    for name, parts in blocks.items():
        for inner in (inner for part in parts for inner in part.modules()):
            if owner.setdefault(inner, name) != name:
                raise ValueError(
                    f"the blocks {owner[inner]} and {name} share a {type(inner).__name__}, which would be scaled "
                    "twice; choose blocks that are not inside each other"
                )
