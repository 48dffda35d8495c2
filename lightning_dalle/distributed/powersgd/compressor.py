"""PowerSGD: gradients cross a slow link as two thin factors (Vogels et al. 2019; Ramesh et al. 2021, appendix E)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.powersgd.comm import WIRE_FORMATS, Traffic, WireFormat, average_over_group, wire_format
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.linalg import orthonormal_basis, thin_product
from lightning_dalle.distributed.powersgd.plan import CompressionPlan, MatrixPlan, plan_compression
from lightning_dalle.ops.finite import all_finite
from lightning_dalle.ops.hardware import product_dtype
from lightning_dalle.ops.random import keyed_generator


class ResidualStore:
    """Residuals by the place of their tensor, in a compact format if asked for.

    In the exact format a residual keeps the memory of the gradient that it was left in: handed back as the next
    gradient's accumulator it needs no buffer of its own.
    """

    def __init__(self, format: WireFormat) -> None:
        self._format = format
        self._kept: dict[int, tuple[Tensor, torch.dtype]] = {}

    def __contains__(self, place: object) -> bool:
        return place in self._kept

    def keep(self, place: int, residual: Tensor) -> None:
        """Replace what there was. The residual now belongs to the store."""
        self._kept[place] = (self._format.encode(residual), residual.dtype)

    def take(self, place: int) -> Tensor | None:
        """Hand out the residual, which the store then has no more."""
        if place not in self._kept:
            return None
        encoded, dtype = self._kept.pop(place)
        return self._format.decode(encoded).to(dtype)

    def peek(self, place: int) -> Tensor | None:
        """The residual, which stays; not to be changed."""
        if place not in self._kept:
            return None
        encoded, dtype = self._kept[place]
        return self._format.decode(encoded).to(dtype)

    def norm(self) -> Tensor:
        """The 2-norm of all residuals together."""
        squares = [self._format.decode(encoded).double().square().sum() for encoded, _ in self._kept.values()]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)

    @property
    def num_bytes(self) -> int:
        """Memory that the residuals take."""
        return sum(encoded.numel() * encoded.element_size() for encoded, _ in self._kept.values())


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


class PowerSGD:
    """Averages the gradients of a fixed list of tensors over a process group, with error feedback.

    A step has two halves, so that processes of other groups can have their say between them:

    1. add `residuals.take(place)` to each gradient, best by accumulating into it, and `reduce` them;
    2. `accept` the result, which gives the mean gradients and keeps what they lack, or `reject` it.

    The sum over the group of the residuals after a step is the sum of the gradients before it less the group's size
    times the mean.

    Args:
        tensors: What gradients look like, by name; only shape, dtype and device count.
        group: The processes that hold the same tensors. With a single one nothing is compressed.
        excluded: Names of tensors that travel whole.
        shard: Number of this part, where tensors are parts of larger ones; each gets random factors of its own.

    Attributes:
        plan: What is compressed after the first `start_powersgd_iter`.
        residuals: What past steps left out.
        traffic: Counted bytes.
        steps: Accepted ones.

    Example:
        >>> from torch import distributed
        >>> store = distributed.HashStore()
        >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> compressor = PowerSGD({"weight": torch.zeros(64, 32)}, PowerSGDConfig(rank=2), distributed.group.WORLD)
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
        self.config = config
        self.group = group
        self.names = tuple(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._whole_plan = plan_compression(shapes, rank=1, excluded=frozenset(self.names))
        self.plan = self._whole_plan
        if group.size() > 1:
            self.plan = plan_compression(
                shapes,
                rank=config.rank,
                min_compression_rate=config.min_compression_rate,
                minimum_elements=config.minimum_elements,
                excluded=excluded,
                # Of tall matrices a warm start follows the gradient better when it remembers the side of the inputs.
                transpose=not config.warm_start,
            )
        self._like = [torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in tensors.values()]
        self._shapes = list(shapes.values())
        self.queries = {matrix.name: self._draw_query(matrix, shard) for matrix in self.plan.matrices}
        self.residuals = ResidualStore(wire_format(config.residual_format))
        self.traffic = Traffic()
        self.steps = 0

    @torch.no_grad()
    def reduce(
        self, gradients: Sequence[Tensor | None], measure: bool = False, factors: Sequence[Tensor] | None = None
    ) -> Reduction:
        """The mean over the group, residuals included. All processes must call it; changes nothing but `traffic`.

        Args:
            gradients: In the order of the tensors; None stands for zero.
            measure: Whether to look for `reconstruction_errors`, which costs a pass over the gradients.
            factors: Means of the first factors, where these have travelled already.
        """
        plan = self._whole_plan if self.steps < self.config.start_powersgd_iter else self.plan
        self._count_uncompressed(plan)
        # 1. Everything but the second factors.
        own = [self.first_factor(planned, gradients[planned.place]) for planned in plan.matrices if factors is None]
        flags, whole, products = self._average_first(
            self._flags(gradients, plan, factors or own),
            [self._or_zero(gradients[place], place) for place in plan.uncompressed],
            own,
        )
        used = tuple((flags[1:] > 0).tolist())
        # 2. The shared bases, unless a gradient is not finite or the products overflowed beyond repair.
        products = [self._clamp_infinities(product) for product in factors or products]
        if flags[0] > 0 or any(bool(product.isnan().any()) for product in products):
            return Reduction(plan, False, flags.new_full((), torch.inf, dtype=torch.float64), used)
        bases = [orthonormal_basis(product) for product in products]
        # 3. The second factors.
        matrices = [
            planned.matrix_of(self._or_zero(gradients[planned.place], planned.place)) for planned in plan.matrices
        ]
        local = [thin_product(matrix.to(basis.dtype).T, basis) for matrix, basis in zip(matrices, bases, strict=True)]
        coefficients, sent = average_over_group(local, wire_format(self.config.wire_format), self.group)
        self.traffic.sent += sent
        norm = _squared_norm([*coefficients, *whole], like=flags)
        errors = reconstruction_errors(plan, matrices, local) if measure else None
        finite = bool(norm.isfinite())
        return Reduction(plan, finite, norm, used, tuple(bases), tuple(coefficients), tuple(whole), errors)

    def first_factor(self, planned: MatrixPlan, gradient: Tensor | None) -> Tensor:
        """This process's part of a first factor, at least single precision; None stands for zero."""
        matrix = self._matrix(planned, gradient)
        matrix = matrix.to(product_dtype(matrix.dtype, matrix.device))
        product = thin_product(matrix, self.queries[planned.name].to(matrix.dtype))
        return product.to(torch.promote_types(product.dtype, torch.float32))

    @torch.no_grad()
    def accept(self, reduction: Reduction, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The mean gradients; what `gradients` hold beyond them becomes the residual, in their own memory.

        A tensor that no process had a gradient of has none afterwards.
        """
        means: list[Tensor | None] = [None] * len(self.names)
        for place, mean in zip(reduction.plan.uncompressed, reduction.whole, strict=True):
            if reduction.used[place]:
                means[place] = mean.to(self._like[place].dtype)
        factors = zip(reduction.plan.matrices, reduction.bases, reduction.coefficients, strict=True)
        for matrix, basis, coefficients in factors:
            if reduction.used[matrix.place]:
                means[matrix.place] = self._accept_matrix(matrix, basis, coefficients, gradients)
        self.steps += 1
        return means

    @torch.no_grad()
    def reject(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep for the next step what this process has of compressed gradients, unless it is itself not finite."""
        if not self.config.error_feedback or self.steps < self.config.start_powersgd_iter:
            return
        for matrix in self.plan.matrices:
            gradient = gradients[matrix.place]
            if gradient is not None and all_finite([gradient]):
                self.residuals.keep(matrix.place, gradient)

    def _accept_matrix(
        self, matrix: MatrixPlan, basis: Tensor, coefficients: Tensor, gradients: Sequence[Tensor | None]
    ) -> Tensor:
        left, right = (coefficients, basis) if matrix.transposed else (basis, coefficients)
        mean = (left @ right.T).view(self._shapes[matrix.place]).to(self._like[matrix.place].dtype)
        if self.config.warm_start:
            self.queries[matrix.name] = coefficients
        if self.config.error_feedback:
            self.residuals.keep(matrix.place, self._or_zero(gradients[matrix.place], matrix.place).sub_(mean))
        return mean

    def _average_first(
        self, flags: Tensor, whole: list[Tensor], products: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Means of flags, uncompressed gradients and first factors: one message if all of it travels in 32 bits."""
        exact, factors = WIRE_FORMATS["fp32"], wire_format(self.config.wire_format)
        if factors.is_exact:
            means, sent = average_over_group([flags, *whole, *products], exact, self.group)
        else:
            means, sent = average_over_group([flags, *whole], exact, self.group)
            thin, sent_thin = average_over_group(products, factors, self.group)
            means, sent = means + thin, sent + sent_thin
        self.traffic.sent += sent
        return means[0], means[1 : 1 + len(whole)], means[1 + len(whole) :]

    def _flags(self, gradients: Sequence[Tensor | None], plan: CompressionPlan, products: Sequence[Tensor]) -> Tensor:
        """Whether something is not finite, then for each tensor whether there is a gradient."""
        present = [gradient for gradient in gradients if gradient is not None]
        whole = [gradient for place in plan.uncompressed if (gradient := gradients[place]) is not None]
        # A finite product vouches for its matrix, which takes longer to look at: nothing that is not finite cancels.
        finite = all_finite([*whole, *products]) or all_finite(present)
        flags = [not finite, *(gradient is not None for gradient in gradients)]
        return torch.tensor(flags, dtype=torch.float32, device=self._like[0].device)

    def _clamp_infinities(self, product: Tensor) -> Tensor:
        largest = wire_format(self.config.wire_format).largest
        return product.nan_to_num(nan=torch.nan, posinf=largest, neginf=-largest)

    def _matrix(self, planned: MatrixPlan, gradient: Tensor | None) -> Tensor:
        return planned.matrix_of(self._or_zero(gradient, planned.place))

    def _or_zero(self, gradient: Tensor | None, place: int) -> Tensor:
        return self._like[place].new_zeros(self._shapes[place]) if gradient is None else gradient

    def _draw_query(self, matrix: MatrixPlan, shard: int) -> Tensor:
        """Drawn on the CPU, so that every device gets the same numbers."""
        like = self._like[matrix.place]
        generator = keyed_generator((self.config.seed, shard, *matrix.name.encode()))
        query = torch.randn(matrix.columns, matrix.rank, generator=generator)
        return query.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _count_uncompressed(self, plan: CompressionPlan) -> None:
        size = self.group.size()
        self.traffic.uncompressed += 2 * (size - 1) * 4 * plan.num_elements // size


def _squared_norm(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum() if squares else like.new_zeros((), dtype=torch.float64)
