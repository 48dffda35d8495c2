"""Masks and inputs of a sequence whose length no number of ranks divides, with plain attention to compare with."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask
from lightning_dalle.ops.attention.patterns import AttentionPattern

TEXT, HEIGHT, WIDTH = 31, 15, 18
LENGTH = TEXT + HEIGHT * WIDTH
BATCH, HEAD_DIM = 2, 4
DOCUMENTS = torch.tensor([[0] * 50 + [1] * 130 + [2] * (LENGTH - 180)])
# Twice the same number: documents need not be in order.
OTHER_DOCUMENTS = torch.tensor([[5] * 3 + [1] * 150 + [5] * (LENGTH - 153)])


def _positions_before(*lengths: int) -> Tensor:
    return torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)


MASKS = {
    "causal": SequenceMask("causal"),
    "bidirectional": SequenceMask("bidirectional"),
    "prefix": SequenceMask("causal", prefix_length=140),
    "row": SequenceMask(AttentionPattern("row", TEXT, HEIGHT, WIDTH)),
    "column": SequenceMask(AttentionPattern("column", TEXT, HEIGHT, WIDTH)),
    "convolution": SequenceMask(AttentionPattern("convolution", TEXT, HEIGHT, WIDTH, kernel_size=5)),
    "pattern_causal": SequenceMask(AttentionPattern("causal", TEXT, HEIGHT, WIDTH)),
    "pattern_full": SequenceMask(AttentionPattern("full", TEXT, HEIGHT, WIDTH)),
    "document_ids": SequenceMask("causal", document_ids=DOCUMENTS),
    "documents_by_sample": SequenceMask("bidirectional", document_ids=torch.cat([DOCUMENTS, OTHER_DOCUMENTS])),
    "padding": SequenceMask("bidirectional", key_padding_mask=_positions_before(200, LENGTH - 1)),
    "padding_in_front": SequenceMask("causal", key_padding_mask=~_positions_before(150, 1)),
    "padded_row": SequenceMask(
        AttentionPattern("row", TEXT, HEIGHT, WIDTH), key_padding_mask=~_positions_before(3, 20)
    ),
}


def inputs(heads: int, key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, number, LENGTH, HEAD_DIM) for number in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(mask: SequenceMask, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of one process; 0 where a query sees no key."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    seen = mask.attends(torch.arange(LENGTH), torch.arange(LENGTH)).unsqueeze(1)
    output = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    output = output.masked_fill(~seen.any(-1, keepdim=True), 0)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), tensors[3])]


def shards(layout: SequenceLayout, rank: int, tensors: list[Tensor]) -> list[Tensor]:
    """A rank's parts, as leaves of their own."""
    return [layout.shard(tensor, rank, dim=-2).clone().requires_grad_() for tensor in tensors]
