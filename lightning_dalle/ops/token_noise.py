"""Random tokens in place of some of a sequence's own."""

import torch
from jaxtyping import Int
from torch import Tensor


def replace_tokens(
    tokens: Int[Tensor, "*shape"], share: float, vocabulary_size: int, generator: torch.Generator
) -> Int[Tensor, "*shape"]:
    """A copy in which each token is, with probability `share`, one drawn uniformly from the whole vocabulary.

    Args:
        generator: Of the tokens' device.
    """
    drawn = torch.randint(vocabulary_size, tokens.shape, generator=generator, device=tokens.device)
    replaced = torch.rand(tokens.shape, generator=generator, device=tokens.device) < share
    return torch.where(replaced, drawn, tokens)
