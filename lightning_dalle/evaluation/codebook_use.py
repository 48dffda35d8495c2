"""How much of a codebook a set of images uses."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric


class CodebookUse(Metric):
    """Number of distinct codes used and the perplexity exp(entropy) of their frequencies, over all ranks.

    Args:
        codebook_size: K; ids are in 0..K-1.

    Example:
        >>> metric = CodebookUse(codebook_size=8)
        >>> metric.update(torch.tensor([[0, 1], [0, 1]]))
        >>> metric.compute()
        {'codes_used': tensor(2.), 'code_perplexity': tensor(2.)}
    """

    full_state_update = False
    counts: Int[Tensor, " codes"]

    def __init__(self, codebook_size: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(codebook_size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ids: Int[Tensor, "..."]) -> None:
        """Count the codes of a batch."""
        self.counts += torch.bincount(ids.flatten(), minlength=len(self.counts))

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        """Return `codes_used` and `code_perplexity`."""
        frequencies = self.counts / self.counts.sum()
        entropy = torch.special.entr(frequencies).sum()
        return {"codes_used": (self.counts > 0).sum().float(), "code_perplexity": entropy.exp()}
