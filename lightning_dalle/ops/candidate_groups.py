"""Which sequences of a batch are candidates of one caption, so that they can share what they have in common."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class CandidateGroups:
    """Sequences folded by caption: to its text, the candidates' queries are those of one sequence.

    Args:
        captions: The caption of each sequence, in any order; every number from 0 to the largest occurs.
    """

    def __init__(self, captions: Int[Tensor, " sequences"]) -> None:
        self.captions = captions
        counts = captions.bincount()
        order = captions.argsort(stable=True)
        rank = torch.arange(len(captions), device=captions.device) - (counts.cumsum(0) - counts)[captions[order]]
        self._num_captions, self._most = len(counts), int(counts.max())
        self._places = captions * self._most + torch.empty_like(rank).index_copy_(0, order, rank)

    def fold(
        self, query: Float[Tensor, "sequences heads 1 head_dim"]
    ) -> Float[Tensor, "captions heads candidates head_dim"]:
        """The queries by caption, zeros where one has fewer candidates than another."""
        _, heads, _, head_dim = query.shape
        places = query.new_zeros(self._num_captions * self._most, heads, head_dim)
        places.index_copy_(0, self._places, query.squeeze(2))
        return places.unflatten(0, (self._num_captions, self._most)).transpose(1, 2)

    def unfold(
        self, folded: Float[Tensor, "captions heads candidates *rest"]
    ) -> Float[Tensor, "sequences heads 1 *rest"]:
        """What belongs to each sequence, in the order of the batch."""
        return folded.transpose(1, 2).flatten(0, 1).index_select(0, self._places).unsqueeze(2)
