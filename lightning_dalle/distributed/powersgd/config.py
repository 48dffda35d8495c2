"""Settings of the PowerSGD compressor."""

from dataclasses import dataclass

from lightning_dalle.distributed.powersgd.comm import wire_format


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """What is compressed, and how; the defaults are the paper's where it gives them.

    Args:
        rank: Of each process's matrices.
        min_compression_rate: Share of its elements that a matrix must save to be compressed.
        minimum_elements: Smaller tensors are not compressed.
        error_feedback: Keep what compression left out and add it to the next gradient.
        warm_start: Start from the last factor instead of a fixed random one (Vogels et al.), which loses less and needs
            memory for the factors. Matrices are then taken as they are, not transposed to have no more rows than
            columns.
        wire_format: Of the factors on the wire; everything else travels in 32 bits.
        residual_format: In which the residual rests between steps.
        start_powersgd_iter: Updates at the start that are sent whole.
        overlap: Send first factors during an update's last backward pass, as `ShardedGradients` does it; the result is
            the same.
        seed: Of the fixed random factors.

    Raises:
        ValueError: If a number is out of range, a format unknown, or `overlap` meets another wire format than fp32.
    """

    rank: int = 4
    min_compression_rate: float = 0.5
    minimum_elements: int = 0
    error_feedback: bool = True
    warm_start: bool = False
    wire_format: str = "fp32"
    residual_format: str = "fp32"
    start_powersgd_iter: int = 0
    overlap: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank ({self.rank}) must be at least 1")
        if self.min_compression_rate >= 1:
            raise ValueError(
                f"min_compression_rate ({self.min_compression_rate}) must be below 1, where nothing is compressed"
            )
        if self.start_powersgd_iter < 0:
            raise ValueError(f"start_powersgd_iter ({self.start_powersgd_iter}) must be at least 0")
        wire_format(self.wire_format)
        wire_format(self.residual_format)
        if self.overlap and self.wire_format != "fp32":
            raise ValueError(
                f"wire_format ({self.wire_format!r}) must be 'fp32' with overlap, where plain sums run beside a "
                "backward pass; change it, or leave overlap out"
            )
