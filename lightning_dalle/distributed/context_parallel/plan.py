"""What a module declares so that its sequences can be cut among processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# A key of a batch that is a mapping, or a place in one that is a sequence.
BatchEntry = str | int


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Which tensors are cut along which dimension, and which parts are joined again.

    A module can be cut in three ways. Between `inputs` and `outputs`, say the first layer and the last, all else sees
    whole sequences, and the loss needs no change. From `inputs` on, where nothing is joined; then the loss is a
    `sequence_mean`, over the labels of `local_positions`. Or from the `batch` on; then positions and labels are entries
    that are cut too, made of the whole sequence, and the loss is a `sequence_mean`. Attention is redirected where the
    module calls `ops.attention.attend` or `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        batch: Entries of each step's batch that are cut, and their dimension.
        inputs: Arguments of submodules that are cut, by the submodule's name and the argument's.
        outputs: Submodules whose output is joined along a dimension.
        predictions: Dimension along which what `predict_step` returns is joined.
        documents: Entry of the batch with the number of the packed document of each position, [batch, length].
        key_padding_mask: Entry of the batch that is False where a position is padding, which nobody attends to.
        prefix_length: First positions that all positions attend to, where attention is causal.
        hidden_dim: Dimension of positions in hidden states, which dropout needs to know.
        length: Of the sequences, where it is always the same.
        num_heads: Smallest number of heads of queries, keys or values, where it is known.

    Raises:
        ValueError: If nothing is cut.
    """

    batch: Mapping[BatchEntry, int] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    predictions: int | None = None
    documents: BatchEntry | None = None
    key_padding_mask: BatchEntry | None = None
    prefix_length: int = 0
    hidden_dim: int = 1
    length: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        if not self.batch and not self.inputs:
            raise ValueError("batch and inputs are both empty, but one of them must name what is cut")
