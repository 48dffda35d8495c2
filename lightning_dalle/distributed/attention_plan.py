"""The blocks that a mask shows of the attention between two sets of runs of positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from lightning_dalle.distributed.sequence_mask import SequenceMask, Verdict

# Side of the blocks that a partly hidden block is cut into. Smaller ones hide less, larger ones are computed faster.
_BLOCK = 128


@dataclass(frozen=True)
class PlannedBlock:
    """A dense block of queries and keys.

    Attributes:
        queries: Their positions in the whole sequence.
        query_start: Where they start in the tensor that holds them.
        causal: Whether query i of the block sees its keys 0..i alone.
        hidden: True where a query does not see a key, [batch or 1, 1, queries, keys].
        blind: True where a query sees no key of the block, [batch or 1, 1, queries]; nothing if there is none.
    """

    queries: range
    keys: range
    query_start: int
    key_start: int
    causal: bool = False
    hidden: Tensor | None = None
    blind: Tensor | None = None

    def of_queries(self, tensor: Tensor, dim: int = -2) -> Tensor:
        """The block's queries, as a view of a tensor that has positions along `dim`."""
        return tensor.narrow(dim, self.query_start, len(self.queries))

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The block's keys, as a view."""
        return tensor.narrow(-2, self.key_start, len(self.keys))

    def key_pieces(self, total: Tensor) -> list[Tensor]:
        """The block's keys of [batch, key_heads, keys, head_dim], as a view."""
        return [self.of_keys(total)]

    def call_size(self, queries: Tensor) -> int:
        """How many samples one call takes: all."""
        return len(queries)

    def of_sequences(self, numbers: Tensor) -> Tensor:
        """Numbers of samples and heads, [batch, heads, 1, 1], to be broadcast to the block's scores."""
        return numbers

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those of queries and keys in the whole sequence, to be broadcast to the block's scores."""
        return _positions(self.queries, device).unsqueeze(-1), _positions(self.keys, device)


def plan_blocks(
    mask: SequenceMask,
    query_runs: Sequence[range],
    key_runs: Sequence[range],
    device: torch.device | str = "cpu",
    finely: bool = False,
) -> list[PlannedBlock]:
    """Blocks that hold all that the mask shows, each pair once.

    Args:
        query_runs: Positions of the queries, in the order in which their tensor holds them.
        finely: Cut blocks that are wholly shown too, for what holds all scores of a block.
    """
    return [
        _block(mask, verdict, queries, keys, query_start + queries.start, key_start + keys.start, device)
        for query_start, query_run in _placed(query_runs, mask.border)
        for key_start, key_run in _placed(key_runs, mask.border)
        for verdict, queries, keys in _shown(mask, query_run, key_run, finely)
    ]


def _placed(runs: Sequence[range], border: int) -> Iterator[tuple[int, range]]:
    """Each run, in two where it goes across the border, with what to add to a position to get its place."""
    starts = accumulate(map(len, runs), initial=0)
    for start, run in zip(starts, runs, strict=False):
        middle = min(max(border, run.start), run.stop)
        for part in (range(run.start, middle), range(middle, run.stop)):
            if part:
                yield start - run.start, part


def _shown(mask: SequenceMask, queries: range, keys: range, finely: bool) -> Iterator[tuple[Verdict, range, range]]:
    verdict = mask.classify(queries, keys)
    if verdict == "skip":
        return
    if verdict != "partial" and not finely:
        yield verdict, queries, keys
        return
    for strip in _cut(queries):
        judged = ((_judge(mask, strip, part), part) for part in _cut(keys))
        for joint, neighbours in groupby(judged, key=lambda pair: pair[0]):
            parts = [part for _, part in neighbours]
            together = range(parts[0].start, parts[-1].stop)
            if joint != "skip":
                yield joint, strip, _seen(mask, strip, together) if joint == "partial" else together


def _cut(run: range) -> Iterator[range]:
    return (run[start : start + _BLOCK] for start in range(0, len(run), _BLOCK))


def _judge(mask: SequenceMask, queries: range, keys: range) -> Verdict:
    """The verdict, with a look at the pairs where it is not clear."""
    verdict = mask.classify(queries, keys)
    if verdict != "partial":
        return verdict
    seen = mask.attends(_positions(queries), _positions(keys))
    if seen.all():
        return "full"
    return "partial" if seen.any() else "skip"


def _seen(mask: SequenceMask, queries: range, keys: range) -> range:
    """The keys without those at both ends that no query sees."""
    seen = mask.attends(_positions(queries), _positions(keys)).flatten(0, 1).any(0).nonzero()
    return keys[int(seen[0]) : int(seen[-1]) + 1]


def _block(
    mask: SequenceMask,
    verdict: Verdict,
    queries: range,
    keys: range,
    query_start: int,
    key_start: int,
    device: torch.device | str,
) -> PlannedBlock:
    if verdict != "partial":
        return PlannedBlock(queries, keys, query_start, key_start, causal=verdict == "causal")
    hidden = ~mask.attends(_positions(queries, device), _positions(keys, device)).unsqueeze(1)
    blind = hidden.all(-1)
    return PlannedBlock(queries, keys, query_start, key_start, False, hidden, blind if blind.any() else None)


def _positions(run: range, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(run.start, run.stop, device=device)
