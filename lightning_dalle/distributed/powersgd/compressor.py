"""PowerSGD: gradients are all-reduced as P and Q^T of low rank (Vogels et al. 2019; Ramesh et al. 2021, appendix E)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.powersgd.comm import (
    WIRE_FORMATS,
    CompressionStatistics,
    WireFormat,
    average_over_group,
    wire_format,
)
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.plan import CompressionPlan, MatrixPlan, plan_compression
from lightning_dalle.ops.finite import all_finite
from lightning_dalle.ops.hardware import product_dtype
from lightning_dalle.ops.random import keyed_generator

# Of the identity against the largest entry: an absolute one would outweigh small gradients.
_RELATIVE_SHIFT = 1e-6


class ErrorFeedbackBuffers:
    """Error-feedback buffers by the index of their tensor, in a compact format if asked for.

    In the exact format a buffer keeps the memory of the gradient that it was left in: handed back as the next
    gradient's accumulator, it needs no memory of its own.
    """

    def __init__(self, format: WireFormat) -> None:
        self._format = format
        self._kept: dict[int, tuple[Tensor, torch.dtype]] = {}

    def __contains__(self, index: object) -> bool:
        return index in self._kept

    def keep(self, index: int, error: Tensor) -> None:
        """Replace the buffer by `error`, which now belongs to this object."""
        self._kept[index] = (self._format.encode(error), error.dtype)

    def take(self, index: int) -> Tensor | None:
        """Hand out the buffer, which is then no longer kept."""
        error = self.peek(index)
        self._kept.pop(index, None)
        return error

    def peek(self, index: int) -> Tensor | None:
        """Return the buffer, which must not be changed."""
        if index not in self._kept:
            return None
        encoded, dtype = self._kept[index]
        return self._format.decode(encoded).to(dtype)

    def norm(self) -> Tensor:
        """Return the 2-norm of all buffers together."""
        squares = [self._format.decode(encoded).double().square().sum() for encoded, _ in self._kept.values()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)

    @property
    def num_bytes(self) -> int:
        """Memory that the buffers take."""
        return sum(encoded.numel() * encoded.element_size() for encoded, _ in self._kept.values())


@dataclass(frozen=True)
class Reduction:
    """Mean gradient over a group, still as P and Q; the same bits on each process.

    Attributes:
        finite: Whether the gradients of every process were.
        squared_norm: Squared norm of the mean gradient; P is orthonormal, so that Q has the norm of the approximation.
        used: By index, whether any process had a gradient.
        p: Orthonormal P of each matrix of the plan.
        q: Mean Q of each matrix of the plan.
        uncompressed: Means of the other gradients.
        reconstruction_errors: By name, the share of the norm of this process's gradient that lies outside the span of
            P; None unless asked for.
    """

    plan: CompressionPlan
    finite: bool
    squared_norm: Tensor
    used: tuple[bool, ...]
    p: tuple[Tensor, ...] = ()
    q: tuple[Tensor, ...] = ()
    uncompressed: tuple[Tensor, ...] = ()
    reconstruction_errors: Mapping[str, float] | None = None


def reconstruction_errors(
    plan: CompressionPlan, matrices: Sequence[Tensor], local_q: Sequence[Tensor]
) -> dict[str, float]:
    """Return by name the share of each matrix's norm that lies outside the span of P.

    Args:
        local_q: Q of these matrices, before it is averaged.
    """
    errors = {}
    for matrix, gradient, q in zip(plan.matrices, matrices, local_q, strict=True):
        total = gradient.double().square().sum()
        outside = (total - q.double().square().sum()).clamp(min=0)
        errors[matrix.name] = float((outside / total).sqrt()) if total > 0 else 0.0
    return errors


class PowerSGD:
    """Averages the gradients of a fixed list of tensors over a process group, with error feedback.

    A step has two halves, so that processes of other groups can have their say between them:

    1. add `error_feedback.take(index)` to each gradient, best by accumulating into it, and `reduce` them;
    2. `accept` the result, which gives the mean gradients and keeps what they miss, or `reject` it.

    The sum over the group of the error-feedback buffers after a step is the sum of the gradients before it less the
    group's size times the mean.

    Args:
        tensors: Stand-ins for the gradients, by name; only shape, dtype and device count.
        group: Processes that hold the same tensors. In a group of one nothing is compressed.
        excluded: Names of tensors that are sent uncompressed.
        shard: Number of this shard, where tensors are shards of larger ones; each gets a random Q of its own.

    Attributes:
        plan: What is compressed after the first `start_powersgd_iter` steps.
        initial_q: Q that the next step starts from, by name: random, or the last one under `warm_start`.
        error_feedback: What past steps missed.
        communication: Counted bytes.
        steps: Number of accepted steps.

    Example:
        >>> from torch import distributed
        >>> store = distributed.HashStore()
        >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> config = PowerSGDConfig(matrix_approximation_rank=2)
        >>> compressor = PowerSGD({"weight": torch.zeros(64, 32)}, config, distributed.group.WORLD)
        >>> gradient = torch.ones(64, 32)
        >>> reduction = compressor.reduce([gradient])
        >>> (mean,) = compressor.accept(reduction, [gradient])
        >>> distributed.destroy_process_group()
        >>> bool((mean == 1).all())
        True
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: PowerSGDConfig,
        group: ProcessGroup,
        *,
        excluded: frozenset[str] = frozenset(),
        shard: int = 0,
    ) -> None:
        self.config = config.per_shard(1)
        self.group = group
        self.names = tuple(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._uncompressed_plan = plan_compression(shapes, rank=1, excluded=frozenset(self.names))
        self.plan = self._uncompressed_plan
        if group.size() > 1:
            self.plan = plan_compression(
                shapes,
                rank=self.config.matrix_approximation_rank,
                min_compression_rate=config.min_compression_rate,
                min_elements=config.min_elements,
                excluded=excluded,
                # For tall matrices a warm start follows the gradient better when it remembers the side of the inputs.
                transpose=not config.warm_start,
            )
        self._like = [torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in tensors.values()]
        self._shapes = list(shapes.values())
        self.initial_q = {matrix.name: self._draw_q(matrix, shard) for matrix in self.plan.matrices}
        self.error_feedback = ErrorFeedbackBuffers(wire_format(config.error_feedback_format))
        self.communication = CompressionStatistics()
        self.steps = 0

    @torch.no_grad()
    def reduce(
        self, gradients: Sequence[Tensor | None], measure: bool = False, mean_p: Sequence[Tensor] | None = None
    ) -> Reduction:
        """Average over the group. All processes must call it; it changes nothing but `communication`.

        Args:
            gradients: In the order of the tensors, with the error-feedback buffers added; None stands for zero.
            measure: Whether to compute `reconstruction_errors`, which costs a pass over the gradients.
            mean_p: P of each matrix, averaged already, where it was sent during the backward pass.
        """
        plan = self._uncompressed_plan if self.steps < self.config.start_powersgd_iter else self.plan
        self._count_uncompressed(plan)
        # 1. P = M Q of every matrix.
        local_p = [self.local_p(matrix, gradients[matrix.index]) for matrix in plan.matrices if mean_p is None]
        # 2. All-reduce P, the uncompressed gradients, and flags of what is finite and what is used.
        flags = self._flags(gradients, plan, mean_p or local_p)
        others = [self._or_zero(gradients[index], index) for index in plan.uncompressed]
        flags, others, reduced_p = self._average_with_p(flags, others, local_p)
        used = tuple((flags[1:] > 0).tolist())
        # 3. Orthogonalise P, unless a gradient is not finite or a product overflowed beyond repair.
        p = [self._clamp_infinities(product) for product in mean_p or reduced_p]
        if flags[0] > 0 or any(bool(product.isnan().any()) for product in p):
            return Reduction(plan, False, flags.new_full((), torch.inf, dtype=torch.float64), used)
        p = [orthonormal_basis(product) for product in p]
        # 4. Q = M^T P, and all-reduce Q.
        matrices = [self._matrix(matrix, gradients[matrix.index]) for matrix in plan.matrices]
        local_q = [tall_product(matrix.to(basis.dtype).T, basis) for matrix, basis in zip(matrices, p, strict=True)]
        q, sent = average_over_group(local_q, wire_format(self.config.wire_format), self.group)
        self.communication.bytes_sent += sent
        squared_norm = _squared_norm([*q, *others], like=flags)
        errors = reconstruction_errors(plan, matrices, local_q) if measure else None
        finite = bool(squared_norm.isfinite())
        return Reduction(plan, finite, squared_norm, used, tuple(p), tuple(q), tuple(others), errors)

    def local_p(self, planned: MatrixPlan, gradient: Tensor | None) -> Tensor:
        """Return P of this process's gradient, in at least single precision; None stands for zero."""
        matrix = self._matrix(planned, gradient)
        matrix = matrix.to(product_dtype(matrix.dtype, matrix.device))
        p = tall_product(matrix, self.initial_q[planned.name].to(matrix.dtype))
        return p.to(torch.promote_types(p.dtype, torch.float32))

    @torch.no_grad()
    def accept(self, reduction: Reduction, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the mean gradients; what `gradients` hold beyond them becomes the error-feedback buffer, in place.

        A tensor that no process had a gradient for gets None.
        """
        means: list[Tensor | None] = [None] * len(self.names)
        for index, mean in zip(reduction.plan.uncompressed, reduction.uncompressed, strict=True):
            if reduction.used[index]:
                means[index] = mean.to(self._like[index].dtype)
        for matrix, p, q in zip(reduction.plan.matrices, reduction.p, reduction.q, strict=True):
            if reduction.used[matrix.index]:
                means[matrix.index] = self._accept_matrix(matrix, p, q, gradients[matrix.index])
        self.steps += 1
        return means

    @torch.no_grad()
    def reject(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep this process's compressed gradients for the next step, unless they are not finite themselves."""
        if not self.config.error_feedback or self.steps < self.config.start_powersgd_iter:
            return
        for matrix in self.plan.matrices:
            gradient = gradients[matrix.index]
            if gradient is not None and all_finite([gradient]):
                self.error_feedback.keep(matrix.index, gradient)

    def _accept_matrix(self, matrix: MatrixPlan, p: Tensor, q: Tensor, gradient: Tensor | None) -> Tensor:
        approximation = q @ p.T if matrix.transposed else p @ q.T
        mean = approximation.view(self._shapes[matrix.index]).to(self._like[matrix.index].dtype)
        if self.config.warm_start:
            self.initial_q[matrix.name] = q
        if self.config.error_feedback:
            self.error_feedback.keep(matrix.index, self._or_zero(gradient, matrix.index).sub_(mean))
        return mean

    def _average_with_p(
        self, flags: Tensor, others: list[Tensor], local_p: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Average flags, uncompressed gradients and P: in one message if all of it is sent in 32 bits."""
        exact, compact = WIRE_FORMATS["fp32"], wire_format(self.config.wire_format)
        if compact.is_exact:
            means, sent = average_over_group([flags, *others, *local_p], exact, self.group)
        else:
            means, sent = average_over_group([flags, *others], exact, self.group)
            p, sent_p = average_over_group(local_p, compact, self.group)
            means, sent = means + p, sent + sent_p
        self.communication.bytes_sent += sent
        return means[0], means[1 : 1 + len(others)], means[1 + len(others) :]

    def _flags(self, gradients: Sequence[Tensor | None], plan: CompressionPlan, products: Sequence[Tensor]) -> Tensor:
        """Return whether something is not finite, then for each tensor whether there is a gradient."""
        present = [gradient for gradient in gradients if gradient is not None]
        others = [gradient for index in plan.uncompressed if (gradient := gradients[index]) is not None]
        # A finite product vouches for its matrix, which takes longer to check: what is not finite does not cancel.
        finite = all_finite([*others, *products]) or all_finite(present)
        flags = [not finite, *(gradient is not None for gradient in gradients)]
        return torch.tensor(flags, dtype=torch.float32, device=self._like[0].device)

    def _clamp_infinities(self, product: Tensor) -> Tensor:
        largest = wire_format(self.config.wire_format).largest
        return product.nan_to_num(nan=torch.nan, posinf=largest, neginf=-largest)

    def _matrix(self, planned: MatrixPlan, gradient: Tensor | None) -> Tensor:
        return planned.matrix_of(self._or_zero(gradient, planned.index))

    def _or_zero(self, gradient: Tensor | None, index: int) -> Tensor:
        return self._like[index].new_zeros(self._shapes[index]) if gradient is None else gradient

    def _draw_q(self, matrix: MatrixPlan, shard: int) -> Tensor:
        """Draw the random Q on the CPU, so that every device gets the same numbers."""
        like = self._like[matrix.index]
        generator = keyed_generator((self.config.seed, shard, *matrix.name.encode()))
        q = torch.randn(matrix.columns, matrix.rank, generator=generator)
        return q.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _count_uncompressed(self, plan: CompressionPlan) -> None:
        size = self.group.size()
        self.communication.bytes_uncompressed += 2 * (size - 1) * 4 * plan.num_elements // size


def _squared_norm(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum() if squares else like.new_zeros((), dtype=torch.float64)


def orthonormal_basis(matrix: Float[Tensor, "rows rank"]) -> Float[Tensor, "rows rank"]:
    """Return orthonormal columns whose span holds the matrix's columns; dependent columns are replaced.

    The result has at least single precision. Needs `rank <= rows` and finite entries. A matrix of zeros gives the first
    columns of the identity.

    Example:
        >>> basis = orthonormal_basis(torch.randn(6, 3))
        >>> bool(torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6))
        True
    """
    shifted = matrix.to(torch.promote_types(matrix.dtype, torch.float32), copy=True)
    if shifted.numel():
        shifted.diagonal().add_(_RELATIVE_SHIFT * shifted.abs().max())
    # LAPACK and cuSOLVER factor by Householder reflections.
    return torch.linalg.qr(shifted).Q


def tall_product(
    matrix: Float[Tensor, "rows columns"], tall: Float[Tensor, "columns rank"]
) -> Float[Tensor, "rows rank"]:
    """Return `matrix @ tall`, with `tall` laid out such that BLAS reads the matrix in the order of its memory.

    The matrix may be a transposed view. For a 512 x 256 matrix at rank 2, on one CPU core, this takes a fifth to a
    twentieth of the plain product's time.
    """
    if matrix.stride(-1) == 1:
        return matrix @ tall.T.contiguous().T
    return (tall.T @ matrix.T).T
