"""Settings of context parallelism: how sequences are sharded, and where in a module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_dalle.distributed.context_parallel.layout import LayoutKind

# Key of a batch that is a mapping, or index in one that is a sequence.
BatchEntry = str | int
AttentionKind = Literal["ring", "ulysses", "usp"]


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Which tensors of a module are sharded along which dimension, and which shards are gathered.

    | sharded | gathered | positions and labels | loss |
    | --- | --- | --- | --- |
    | `inputs` of a first layer | `outputs` of a last layer | of whole sequences | as on one process |
    | `inputs` of a first layer | nothing | of `local_positions` | `sequence_mean` |
    | entries of the `batch` | nothing | entries of the batch, made of whole sequences | `sequence_mean` |

    Attention is redirected where the module calls `attend` or `torch.nn.functional.scaled_dot_product_attention`. A
    tensor is taken for a shard of the sequence whose shard has as many positions.

    Args:
        batch: Entries of each step's batch that are sharded, and their dimension.
        inputs: Arguments of submodules that are sharded, by the submodule's name and the argument's.
        outputs: Submodules whose output is gathered along a dimension.
        unsharded: Submodules that see whole tensors in between, such as those of captions, and attend and drop out
            locally; each of their inputs is the same on all processes.
        predictions: Dimension along which the result of `predict_step` is gathered; "whole" says that it has no
            positions. Must be given where `predict_step` runs on shards that `outputs` does not gather.
        document_ids: Entry of the batch with the number of the packed document of each position, [batch, length].
        key_padding_mask: Entry of the batch that is False where a position is padding, which nobody attends to.
        prefix_length: Number of first positions that all positions attend to, where attention is causal.
        sequence_dim: Dimension of positions in the hidden states that dropout gets.
        length: Length of the sequences, where it is always the same.
        num_heads: Smallest number of heads of queries, keys or values, where it is known.

    Raises:
        ValueError: If nothing is sharded.
    """

    batch: Mapping[BatchEntry, int] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    unsharded: Sequence[str] = ()
    predictions: int | Literal["whole"] | None = None
    document_ids: BatchEntry | None = None
    key_padding_mask: BatchEntry | None = None
    prefix_length: int = 0
    sequence_dim: int = 1
    length: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        if not self.batch and not self.inputs:
            raise ValueError("batch and inputs are both empty, but one of them must name what is sharded")

    def masks(self, batch: Any) -> dict[str, Tensor]:
        """Return document ids and padding mask of a batch, where the plan names them."""
        masks: dict[str, Tensor] = {}
        if self.document_ids is not None:
            masks["document_ids"] = batch[self.document_ids]
        if self.key_padding_mask is not None:
            masks["key_padding_mask"] = batch[self.key_padding_mask].bool()
        return masks

    def validate_batch(self, batch: Any) -> None:
        """Refuse a batch without the entries that are sharded.

        Raises:
            ValueError: If one is missing.
        """
        is_mapping, is_sequence = isinstance(batch, Mapping), isinstance(batch, Sequence)
        entries = batch if is_mapping else range(len(batch)) if is_sequence else ()
        missing = [entry for entry in self.batch if entry not in entries]
        if missing:
            raise ValueError(f"the plan shards {missing} of each batch, which this batch does not have")


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig:
    """How each sequence is sharded over a group of neighbouring processes.

    Args:
        degree: Number of processes that share a sequence; "auto" takes those of a machine.
        attention: `ring` rotates keys and values among processes, `ulysses` exchanges positions for heads by
            all-to-all, `usp` does the latter among `ulysses_degree` neighbours and the former across them.
        ulysses_degree: Number of processes that exchange heads; given for `usp` alone, and divides `degree`.
        layout: Which positions each process holds; `zigzag` balances causal attention.
        plan: For a module that has no method `sequence_plan`.

    Raises:
        ValueError: If the settings do not fit each other.
    """

    degree: int | Literal["auto"] = "auto"
    attention: AttentionKind = "ring"
    ulysses_degree: int | None = None
    layout: LayoutKind = "zigzag"
    plan: SequencePlan | None = None

    def __post_init__(self) -> None:
        if self.degree != "auto" and self.degree < 1:
            raise ValueError(
                f"context_parallel_degree ({self.degree}) must be at least 1, or 'auto' for the processes of a machine"
            )
        if self.attention not in get_args(AttentionKind):
            raise ValueError(f"attention ({self.attention!r}) must be one of {', '.join(get_args(AttentionKind))}")
        if (self.attention == "usp") != (self.ulysses_degree is not None):
            raise ValueError(
                f"ulysses_degree ({self.ulysses_degree}) must be given with attention='usp', and with no other"
            )
        if self.layout not in get_args(LayoutKind):
            raise ValueError(f"layout ({self.layout!r}) must be one of {', '.join(get_args(LayoutKind))}")

    def ulysses_degree_of(self, degree: int) -> int:
        """Return the number of processes that exchange heads, of `degree` processes that share a sequence.

        Raises:
            ValueError: If it does not divide `degree`.
        """
        ulysses_degree = {"ring": 1, "ulysses": degree}.get(self.attention, self.ulysses_degree)
        assert ulysses_degree is not None
        if ulysses_degree < 1 or degree % ulysses_degree:
            raise ValueError(
                f"ulysses_degree ({ulysses_degree}) must divide context_parallel_degree ({degree}); change one of them"
            )
        return ulysses_degree
