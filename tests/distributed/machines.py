"""PowerSGD steps of several machines, for tests; and what they must give, by another road."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig


def compressor_of(gradients: Mapping[str, Tensor], settings: Mapping[str, Any], **options: Any) -> PowerSGD:
    """A compressor over all ranks."""
    group = distributed.group.WORLD
    assert group is not None
    return PowerSGD(gradients, PowerSGDConfig(**settings), group, **options)


def step(compressor: PowerSGD, gradients: Sequence[Tensor | None]) -> dict[str, Any]:
    """One step: the mean gradients, the residuals before and after, and what is known of the reduction."""
    accumulated: list[Tensor | None] = []
    before: list[Tensor | None] = []
    for place, gradient in enumerate(gradients):
        residual = compressor.error_feedback.take(place)
        total = residual if gradient is None else gradient.clone()
        if residual is not None and gradient is not None:
            total = residual.add_(gradient)
        accumulated.append(total)
        before.append(None if total is None else total.clone())
    reduction = compressor.reduce(accumulated, measure=True)
    means: list[Tensor | None] = []
    if reduction.finite:
        means = compressor.accept(reduction, accumulated)
    else:
        compressor.reject(accumulated)
    kept = [compressor.error_feedback.peek(place) for place in range(len(gradients))]
    return {
        "before": before,
        "means": means,
        "after": [None if residual is None else residual.clone() for residual in kept],
        "norm": float(reduction.squared_norm.sqrt()),
        "finite": reduction.finite,
        "errors": reduction.reconstruction_errors,
        "bases": reduction.p,
        "queries": dict(compressor.initial_q),
    }


def projected_mean(gradients: Sequence[Tensor], query: Tensor, rank: int) -> Tensor:
    """The mean of the machines' matrices on the span of its product with `query`, by singular values, in float64."""
    mean = torch.stack([gradient.double() for gradient in gradients]).mean(dim=0)
    matrix = mean.flatten(1)
    transposed = matrix.shape[1] != query.shape[0]
    matrix = matrix.T if transposed else matrix
    product = matrix @ query.double()
    product.diagonal().add_(1e-6 * product.abs().max())
    basis = torch.linalg.svd(product, full_matrices=False).U[:, :rank]
    projected = basis @ (basis.T @ matrix)
    return (projected.T if transposed else projected).reshape(mean.shape)
