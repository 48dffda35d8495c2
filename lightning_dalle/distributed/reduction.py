"""The mean gradient of a group of processes, in factors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_dalle.distributed.compression_plan import CompressionPlan


@dataclass(frozen=True)
class Reduction:
    """The mean gradient over a group, still in factors; the same bits in each process.

    Attributes:
        finite: Whether every process's gradient was.
        squared_norm: Of the mean gradient; the bases are orthonormal, so that the other factors have its norm.
        used: Whether any process had a gradient, by place.
        reconstruction_errors: By name, the share of the norm of this process's gradient that lies outside the shared
            basis; empty unless asked for.
    """

    plan: CompressionPlan
    finite: bool
    squared_norm: Tensor
    used: tuple[bool, ...]
    bases: tuple[Tensor, ...] = ()
    coefficients: tuple[Tensor, ...] = ()
    whole: tuple[Tensor, ...] = ()
    reconstruction_errors: Mapping[str, float] | None = None


def reconstruction_errors(
    plan: CompressionPlan, matrices: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> dict[str, float]:
    """By name, the share of each matrix's norm that its part in the shared basis leaves out.

    Args:
        coefficients: The matrices' own second factors, before they are averaged.
    """
    errors = {}
    for matrix, gradient, inside in zip(plan.matrices, matrices, coefficients, strict=True):
        total = gradient.double().square().sum()
        outside = (total - inside.double().square().sum()).clamp(min=0)
        errors[matrix.name] = float((outside / total).sqrt()) if total > 0 else 0.0
    return errors
