"""Sums over process groups in 16-bit wire formats, and the bytes sent."""

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
    """A format.

    Attributes:
        encode: Floating point to what is sent or kept.
        decode: Back, to single precision.
        largest: Finite number.
        is_exact: Whether numbers travel as they are, so that a plain all-reduce adds them.
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
    """The format of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in WIRE_FORMATS:
        raise ValueError(f"format ({name!r}) is unknown; it is one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[name]


def sum_over_group(flat: Float[Tensor, " n"], format: WireFormat, group: ProcessGroup) -> tuple[Tensor, int]:
    """Adds `flat` over the group; each process gets the same bits.

    Exact formats use an all-reduce. Others exchange encoded chunks, add them in single precision in the order of ranks,
    and exchange the encoded sums: twice rounded, however many processes there are, and no more bytes than a ring.

    Returns:
        The sum, and the bytes that this process sent. `flat` may be overwritten.
    """
    size = group.size()
    if format.is_exact:
        distributed.all_reduce(flat, group=group)
        return flat, 2 * (size - 1) * flat.numel() * flat.element_size() // size
    chunk = -(-flat.numel() // size)
    mine = format.encode(pad(flat, (0, chunk * size - flat.numel())))
    theirs = torch.empty_like(mine)
    distributed.all_to_all_single(_bits(theirs), _bits(mine), group=group)
    total = format.encode(format.decode(theirs).view(size, chunk).sum(dim=0))
    distributed.all_gather(list(_bits(theirs).chunk(size)), _bits(total), group=group)
    sent = 2 * (size - 1) * chunk * theirs.element_size()
    return format.decode(theirs)[: flat.numel()].to(flat.dtype), sent


def _bits(encoded: Tensor) -> Tensor:
    """The same memory as bytes: back ends know few 16-bit types."""
    return encoded.view(torch.uint8)


@dataclass
class Traffic:
    """Bytes of payload that this process sent since the start.

    Attributes:
        sent: By a ring all-reduce, 2 (n - 1) / n of a message for n processes.
        uncompressed: What the same reductions of whole gradients would have sent, in 32 bits.
    """

    sent: int = 0
    uncompressed: int = 0

    @property
    def saved(self) -> int:
        """Bytes that did not travel."""
        return self.uncompressed - self.sent

    @property
    def rate(self) -> float:
        """Share that did not travel."""
        return self.saved / self.uncompressed if self.uncompressed else 0.0


def average_over_group(tensors: Sequence[Tensor], format: WireFormat, group: ProcessGroup) -> tuple[list[Tensor], int]:
    """Each tensor's mean over the group, at least single precision, with the same bits in each process.

    All processes must bring tensors of the same shapes. They are divided before they are added, so that the sum cannot
    overflow where the mean does not. In a group of one the tensors are handed back, not copied.

    Returns:
        The means, and the bytes that this process sent.
    """
    if not tensors:
        return [], 0
    if group.size() == 1:
        return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors], 0
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    joined = joined.to(torch.promote_types(joined.dtype, torch.float32)).div_(group.size())
    joined, sent = sum_over_group(joined, format, group)
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], sent
