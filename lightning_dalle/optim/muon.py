"""Muon for the matrices inside a network (Jordan et al. 2024), at the speed of the hardware; AdamW for the rest."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from lightning_dalle.ops.hardware import has_fast_bfloat16


class ChainedOptimizer(Optimizer):
    """Optimizers of different parameters behind the face of one, which Lightning's automatic optimization asks for.

    Parameter groups are those of the parts, one after the other, and the very same mappings: a schedule of the whole
    reaches the parts. The state is shared as well.

    Args:
        optimizers: Each of parameters of its own, without state yet.

    Raises:
        ValueError: If there is none, two share a parameter, or one was stepped already.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4, bias=False))
        >>> parts = torch.optim.AdamW(network[0].parameters()), torch.optim.Muon(network[1].parameters())
        >>> [group["lr"] for group in ChainedOptimizer(*parts).param_groups]
        [0.001, 0.001]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("optimizers () is empty; give at least one")
        stepped = [type(optimizer).__name__ for optimizer in optimizers if optimizer.state]
        if stepped:
            raise ValueError(f"optimizers ({', '.join(stepped)}) were stepped already; chain new ones")
        self.optimizers = optimizers
        # The base class refuses parameters that occur twice, and takes the groups as they are.
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state, as `load_state_dict` makes them anew, for the parts too."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parts, in their order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _share(self) -> None:
        start = 0
        for optimizer in self.optimizers:
            stop = start + len(optimizer.param_groups)
            # Through the part's own hook, which adds what older files lack.
            optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups[start:stop]})
            start = stop


# Elements of one batched call at most: more copies of more matrices would only take memory.
_BATCH_ELEMENTS = 2**24
# With more steps the rounding of a gram matrix, which each step multiplies by about 12, would show.
_MOST_GRAM_STEPS = 6


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that orthogonalises matrices of one shape in one batched call, in a fast number format.

    torch's own multiplies in bfloat16 on every machine, one matrix at a time. Here it is bfloat16 where the hardware
    multiplies it fast (`ops.hardware.has_fast_bfloat16`), else float32. Arguments, defaults, parameter groups and
    state dictionaries are torch's, and updates equal torch's up to the rounding of bfloat16.

    Raises:
        ValueError: If a parameter is no matrix, or is sharded: the orthogonalisation needs whole matrices.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and refuse sharded matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names", [f"parameter {index}" for index in range(len(group["params"]))])
        for name, parameter in zip(names, group["params"], strict=True):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"optimizer ('muon') needs whole matrices, but {name} is sharded; choose optimizer 'adamw'"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, parameters, gradients, buffers)
            if parameters:
                _update(parameters, gradients, buffers, group)
        return loss


def muon_with_adamw(
    matrices: Sequence[tuple[str, Parameter]], others: Optimizer, weight_decay: float
) -> ChainedOptimizer:
    """Chain Muon with an AdamW of torch or of this package, whose learning rate it takes.

    Its steps are as large as AdamW's usually are (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one learning
    rate fits both.

    Args:
        matrices: With their names; of the layers inside, without embeddings and unembeddings.
        others: Optimizer of all other parameters, with names too.

    Raises:
        ValueError: If a matrix is sharded: Muon needs whole ones.
    """
    muon = Muon(matrices, lr=others.defaults["lr"], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return ChainedOptimizer(muon, others)


def orthogonalise(
    matrices: Float[Tensor, "batch rows columns"],
    coefficients: tuple[float, float, float],
    num_steps: int,
    epsilon: float,
) -> Float[Tensor, "batch rows columns"]:
    """Move the singular values of each matrix towards 1 by the quintic Newton-Schulz iteration, in its number format.

    With X the matrix over its Frobenius norm, each step is X <- (a + b A + c A^2) X, where A = X X^T. In float32 and
    for matrices twice as long as wide, the steps are taken on A alone, which is small, and their product multiplies X
    once: the same mathematically, with about half the work. In bfloat16 the rounding of A would not allow it.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT, coefficients, num_steps, epsilon).mT
    a, b, c = coefficients
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norms.clamp(min=epsilon)
    wide = matrices.shape[2] >= 2 * matrices.shape[1]
    if not (wide and matrices.dtype == torch.float32 and 0 < num_steps <= _MOST_GRAM_STEPS):
        for _ in range(num_steps):
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        return x
    gram = torch.bmm(x, x.mT)
    product: Tensor | None = None
    for step in range(num_steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        product = polynomial if product is None else torch.bmm(polynomial, product)
        if step + 1 < num_steps:
            # Both are symmetric and commute.
            gram = torch.bmm(polynomial, torch.bmm(gram, polynomial))
    assert product is not None
    return torch.bmm(product, x)


def _update(parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: dict[str, Any]) -> None:
    """One update in place, with torch's arithmetic up to the orthogonalisation."""
    momentum, learning_rate = group["momentum"], float(group["lr"])
    torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    directions = list(torch._foreach_lerp(gradients, buffers, momentum)) if group["nesterov"] else buffers
    torch._foreach_mul_(parameters, 1 - learning_rate * group["weight_decay"])
    alike: dict[Any, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        alike[parameter.shape, parameter.dtype, parameter.device].append(index)
    for (shape, _, device), indices in alike.items():
        number_format = torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        scale = _learning_rate_scale(group["adjust_lr_fn"], shape)
        size = max(1, _BATCH_ELEMENTS // shape.numel())
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            batch = torch.stack([directions[index].to(number_format) for index in chosen])
            updates = orthogonalise(batch, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for index, update in zip(chosen, updates, strict=True):
                parameters[index].add_(update, alpha=-learning_rate * scale)


def _learning_rate_scale(rule: str | None, shape: torch.Size) -> float:
    """Factor of the learning rate for a matrix of this shape, by the rules of `torch.optim.Muon`."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * float(max(rows, columns)) ** 0.5
    if rule == "spectral_unclamped":
        return float(rows / columns) ** 0.5
    return float(max(1, rows / columns)) ** 0.5
