"""Sums over process groups in 16-bit wire formats, and the bytes that they send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from lightning_dalle.ops import float_formats


@dataclass(frozen=True)
class WireFormat:
    """Number format in which tensors are sent or kept.

    Attributes:
        encode: Turns floating point into what is sent.
        decode: Turns it back, into single precision.
        largest: Largest finite number.
        is_exact: Whether tensors are sent unchanged, so that a plain all-reduce adds them.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    largest: float
    is_exact: bool = False


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _to_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)


def _to_1_6_9(tensor: Tensor) -> Tensor:
    return float_formats.encode(tensor.float(), float_formats.FLOAT_1_6_9, saturate=True)


def _from_1_6_9(codes: Tensor) -> Tensor:
    return float_formats.decode(codes, float_formats.FLOAT_1_6_9)


WIRE_FORMATS = {
    "fp32": WireFormat(_unchanged, _unchanged, torch.finfo(torch.float32).max, is_exact=True),
    "bf16": WireFormat(_to_bfloat16, Tensor.float, torch.finfo(torch.bfloat16).max),
    "1-6-9": WireFormat(_to_1_6_9, _from_1_6_9, float_formats.FLOAT_1_6_9.largest),
}


def wire_format(name: str) -> WireFormat:
    """Return the wire format of this name.

    Raises:
        ValueError: If there is none.
    """
    if name not in WIRE_FORMATS:
        raise ValueError(f"format ({name!r}) is unknown; it must be one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[name]


@dataclass
class CompressionStatistics:
    """Payload that this process has sent since the start.

    Attributes:
        bytes_sent: By a ring all-reduce, 2 (n - 1) / n of a message for n processes.
        bytes_uncompressed: What the same reductions of uncompressed gradients would have sent, in 32 bits.
    """

    bytes_sent: int = 0
    bytes_uncompressed: int = 0

    @property
    def bytes_saved(self) -> int:
        """Bytes that compression saved."""
        return self.bytes_uncompressed - self.bytes_sent

    @property
    def compression_rate(self) -> float:
        """Share of the uncompressed bytes that was saved."""
        return self.bytes_saved / self.bytes_uncompressed if self.bytes_uncompressed else 0.0


def sum_over_group(flat: Float[Tensor, " n"], format: WireFormat, group: ProcessGroup) -> tuple[Tensor, int]:
    """Add `flat` over the group, to the same bits on each process.

    Exact formats use one all-reduce. Others exchange encoded chunks, add them in single precision in the order of
    ranks, and exchange the encoded sums: two roundings for any number of processes, and no more bytes than a ring.

    Returns:
        The sum, and the bytes that this process sent. `flat` may be overwritten.
    """
    size = group.size()
    if format.is_exact:
        distributed.all_reduce(flat, group=group)
        return flat, 2 * (size - 1) * flat.numel() * flat.element_size() // size
    chunk = -(-flat.numel() // size)
    encoded = format.encode(pad(flat, (0, chunk * size - flat.numel())))
    received = torch.empty_like(encoded)
    distributed.all_to_all_single(_bits(received), _bits(encoded), group=group)
    total = format.encode(format.decode(received).view(size, chunk).sum(dim=0))
    distributed.all_gather(list(_bits(received).chunk(size)), _bits(total), group=group)
    sent = 2 * (size - 1) * chunk * received.element_size()
    return format.decode(received)[: flat.numel()].to(flat.dtype), sent


def _bits(encoded: Tensor) -> Tensor:
    """View the same memory as bytes: back ends know few 16-bit types."""
    return encoded.view(torch.uint8)


def average_over_group(tensors: Sequence[Tensor], format: WireFormat, group: ProcessGroup) -> tuple[list[Tensor], int]:
    """Average each tensor over the group, in at least single precision, to the same bits on each process.

    All processes must bring tensors of the same shapes. They are divided before they are added, so that the sum cannot
    overflow where the mean does not. In a group of one the tensors are returned, not copied.

    Returns:
        The means, and the bytes that this process sent.
    """
    if not tensors:
        return [], 0
    if group.size() == 1:
        return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors], 0
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).div_(group.size())
    flat, sent = sum_over_group(flat, format, group)
    means = flat.split([tensor.numel() for tensor in tensors])
    return [mean.view(tensor.shape) for mean, tensor in zip(means, tensors, strict=True)], sent
