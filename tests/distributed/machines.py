"""PowerSGD steps of several replicas, and what they must give, computed by singular values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig


def compressor_of(gradients: Mapping[str, Tensor], settings: Mapping[str, Any], **options: Any) -> PowerSGD:
    """Return a compressor over all ranks."""
    group = distributed.group.WORLD
    assert group is not None
    return PowerSGD(gradients, PowerSGDConfig(**settings), group, **options)


def step(compressor: PowerSGD, gradients: Sequence[Tensor | None]) -> dict[str, Any]:
    """Run one step: return mean gradients, what is to be sent before and left after, and what is known of it."""
    accumulated: list[Tensor | None] = []
    before: list[Tensor | None] = []
    for index, gradient in enumerate(gradients):
        error = compressor.error_feedback.take(index)
        total = error if gradient is None else gradient.clone()
        if error is not None and gradient is not None:
            total = error.add_(gradient)
        accumulated.append(total)
        before.append(None if total is None else total.clone())
    reduction = compressor.reduce(accumulated, measure=True)
    means: list[Tensor | None] = []
    if reduction.finite:
        means = compressor.accept(reduction, accumulated)
    else:
        compressor.reject(accumulated)
    kept = [compressor.error_feedback.peek(index) for index in range(len(gradients))]
    return {
        "before": before,
        "means": means,
        "after": [None if error is None else error.clone() for error in kept],
        "norm": float(reduction.squared_norm.sqrt()),
        "finite": reduction.finite,
        "errors": reduction.reconstruction_errors,
        "p": reduction.p,
        "initial_q": dict(compressor.initial_q),
    }


def projected_mean(gradients: Sequence[Tensor], q: Tensor, rank: int) -> Tensor:
    """Return the mean matrix on the span of its product with `q`, by singular values, in float64."""
    mean = torch.stack([gradient.double() for gradient in gradients]).mean(dim=0)
    matrix = mean.flatten(1)
    transposed = matrix.shape[1] != q.shape[0]
    matrix = matrix.T if transposed else matrix
    product = matrix @ q.double()
    product.diagonal().add_(1e-6 * product.abs().max())
    basis = torch.linalg.svd(product, full_matrices=False).U[:, :rank]
    projected = basis @ (basis.T @ matrix)
    return (projected.T if transposed else projected).reshape(mean.shape)
