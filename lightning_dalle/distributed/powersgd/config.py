"""Settings of PowerSGD, whose defaults are the paper's where it gives them."""

from dataclasses import dataclass, replace

from lightning_dalle.distributed.powersgd.comm import wire_format


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """Settings that choose which gradients PowerSGD compresses, and how.

    Args:
        matrix_approximation_rank: Rank of the approximation of each matrix that one process holds.
        total_matrix_approximation_rank: The same summed over all shards of a matrix, as the paper counts it; replaces
            `matrix_approximation_rank` and must be a multiple of the number of shards.
        min_compression_rate: A matrix is compressed only where P and Q have at most 1 / this many of its elements; 2 as
            of torch's hook. 0 compresses every matrix.
        min_elements: Gradients with fewer elements are sent uncompressed.
        error_feedback: Keep what the approximation misses and add it to the next gradient.
        warm_start: Start from the last Q instead of a fixed random one (Vogels et al. 2019), which loses less and keeps
            Q in memory. Matrices then keep their orientation instead of being transposed to have no more rows than
            columns.
        wire_format: Number format of P and Q between processes; all other gradients are sent in 32 bits.
        error_feedback_format: Number format of the error-feedback buffers between steps.
        start_powersgd_iter: Steps at the start whose gradients are sent uncompressed.
        overlap: All-reduce P during the last backward pass of a step; the result is the same.
        seed: Seeds the random Q; equal seeds give equal matrices on any number of processes.

    Raises:
        ValueError: If a number is out of range, a format unknown, or `overlap` meets another wire format than fp32.
    """

    matrix_approximation_rank: int = 4
    total_matrix_approximation_rank: int | None = None
    min_compression_rate: float = 2.0
    min_elements: int = 0
    error_feedback: bool = True
    warm_start: bool = False
    wire_format: str = "fp32"
    error_feedback_format: str = "fp32"
    start_powersgd_iter: int = 0
    overlap: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        ranks = {
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "total_matrix_approximation_rank": self.total_matrix_approximation_rank,
        }
        for name, rank in ranks.items():
            if rank is not None and rank < 1:
                raise ValueError(f"{name} ({rank}) must be at least 1")
        if self.min_compression_rate < 0:
            raise ValueError(f"min_compression_rate ({self.min_compression_rate}) must be at least 0")
        if self.start_powersgd_iter < 0:
            raise ValueError(f"start_powersgd_iter ({self.start_powersgd_iter}) must be at least 0")
        wire_format(self.wire_format)
        wire_format(self.error_feedback_format)
        if self.overlap and self.wire_format != "fp32":
            raise ValueError(
                f"wire_format ({self.wire_format!r}) must be 'fp32' with overlap=True, where plain sums run beside the "
                "backward pass; change it, or set overlap=False"
            )

    def per_shard(self, num_shards: int) -> "PowerSGDConfig":
        """Return the settings of one shard, with the total rank divided among all of them.

        Raises:
            ValueError: If the total rank is no multiple of `num_shards`.
        """
        total = self.total_matrix_approximation_rank
        if total is None:
            return self
        if total % num_shards:
            raise ValueError(
                f"total_matrix_approximation_rank ({total}) must be a multiple of the number of shards ({num_shards}); "
                "change it, or give matrix_approximation_rank"
            )
        return replace(self, matrix_approximation_rank=total // num_shards, total_matrix_approximation_rank=None)
