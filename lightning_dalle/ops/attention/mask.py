"""Masks over positions of a whole sequence, and the tiles of a sharded one that they show."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.attention.schedule import DENSE_TILE, PlacedRun, Tiles, placed_runs, tile_at

# What a mask shows of a block: nothing, all, keys up to the query alone, or something else.
Verdict = Literal["skip", "full", "causal", "partial"]


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """A rule over positions, which documents and padding may narrow.

    Args:
        rule: Keys up to the query, all keys, or a pattern of text and image.
        prefix_length: First positions that all queries see under the causal rule.
        document_ids: Number of the packed document of each position; only positions of the same one see each other.
        key_padding_mask: False where a position is padding, which nobody sees.

    Raises:
        ValueError: If the rule is unknown, or a prefix is given with a rule that has no use for it.
    """

    rule: Literal["causal", "bidirectional"] | AttentionPattern = "causal"
    prefix_length: int = 0
    document_ids: Int[Tensor, "#batch length"] | None = None
    key_padding_mask: Bool[Tensor, "#batch length"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, AttentionPattern) and self.rule not in ("causal", "bidirectional"):
            raise ValueError(f"rule ({self.rule!r}) must be 'causal', 'bidirectional' or an AttentionPattern")
        if self.prefix_length < 0 or (self.prefix_length > 0 and self.rule != "causal"):
            raise ValueError(f"prefix_length ({self.prefix_length}) must be at least 0, and 0 unless rule is 'causal'")

    @property
    def rule_boundary(self) -> int:
        """Position from which on the rule is another: the first of the image, or after the prefix."""
        return self.rule.text_length if isinstance(self.rule, AttentionPattern) else self.prefix_length

    def check_length(self, length: int) -> None:
        """Refuse a sequence of another length than the mask's own parts.

        Raises:
            ValueError: If one of them has another length.
        """
        lengths = {
            "rule": self.rule.length if isinstance(self.rule, AttentionPattern) else length,
            "document_ids": length if self.document_ids is None else self.document_ids.shape[-1],
            "key_padding_mask": length if self.key_padding_mask is None else self.key_padding_mask.shape[-1],
        }
        for name, own in lengths.items():
            if own != length:
                raise ValueError(f"{name} has {own} positions, but the sequence has length {length}")

    def attends(
        self, queries: Int[Tensor, " queries"], keys: Int[Tensor, " keys"]
    ) -> Bool[Tensor, "#batch queries keys"]:
        """True where a query sees a key; one row for the whole batch unless documents or padding differ in it."""
        pairs = queries.unsqueeze(-1), keys
        seen = self._rule_attends(*pairs).unsqueeze(0)
        if self.document_ids is not None:
            document_ids = self.document_ids.to(queries.device)
            seen = seen & (document_ids[:, queries].unsqueeze(-1) == document_ids[:, keys].unsqueeze(-2))
        if self.key_padding_mask is not None:
            seen = seen & self.key_padding_mask.to(queries.device)[:, keys].unsqueeze(-2)
        return seen

    def classify(self, queries: range, keys: range) -> Verdict:
        """Return what the mask shows of a tile, without a look at its pairs; "partial" may turn out to be less."""
        verdicts = {self._by_rule(queries, keys), self._by_documents(queries, keys), self._by_padding(keys)}
        if "skip" in verdicts:
            return "skip"
        narrowing = verdicts - {"full"}
        if not narrowing:
            return "full"
        return narrowing.pop() if len(narrowing) == 1 else "partial"

    def _rule_attends(self, queries: Tensor, keys: Tensor) -> Tensor:
        if isinstance(self.rule, AttentionPattern):
            return self.rule.attends(queries, keys)
        if self.rule == "bidirectional":
            return torch.ones_like(queries - keys, dtype=torch.bool)
        return (keys <= queries) | (keys < self.prefix_length)

    def _by_rule(self, queries: range, keys: range) -> Verdict:
        if isinstance(self.rule, AttentionPattern):
            return _by_pattern(self.rule, queries, keys)
        if self.rule == "bidirectional" or keys.stop <= self.prefix_length:
            return "full"
        return _by_order(queries, keys) if keys.start >= self.prefix_length else _full_or_partial(queries, keys)

    def _by_documents(self, queries: range, keys: range) -> Verdict:
        if self.document_ids is None:
            return "full"
        lows, highs = zip(
            *(self.document_ids[:, run.start : run.stop].aminmax(dim=1) for run in (queries, keys)), strict=True
        )
        if ((highs[0] < lows[1]) | (highs[1] < lows[0])).all():
            return "skip"
        same = (lows[0] == highs[0]) & (lows[1] == highs[1]) & (lows[0] == lows[1])
        return "full" if same.all() else "partial"

    def _by_padding(self, keys: range) -> Verdict:
        if self.key_padding_mask is None:
            return "full"
        real = self.key_padding_mask[:, keys.start : keys.stop]
        if real.all():
            return "full"
        return "partial" if real.any() else "skip"


def mask_schedule(
    mask: SequenceMask,
    query_runs: Sequence[range],
    key_runs: Sequence[range],
    device: torch.device | str = "cpu",
    finely: bool = False,
) -> list[Tiles]:
    """Return tiles that hold all that any mask shows, each pair once.

    Args:
        query_runs: Positions of the queries, in the order in which their tensor holds them.
        finely: Split tiles that are wholly shown too, for what holds all scores of a tile.
    """
    return [
        _masked_tile(mask, verdict, queries, keys, query_run.shift, key_run.shift, device)
        for query_run in _split_at(query_runs, mask.rule_boundary)
        for key_run in _split_at(key_runs, mask.rule_boundary)
        for verdict, queries, keys in _shown(mask, query_run.positions, key_run.positions, finely)
    ]


def _split_at(runs: Sequence[range], boundary: int) -> Iterator[PlacedRun]:
    """Yield each run, in two where it goes across the boundary."""
    for run in placed_runs(runs):
        middle = min(max(boundary, run.positions.start), run.positions.stop)
        for part in (range(run.positions.start, middle), range(middle, run.positions.stop)):
            if part:
                yield PlacedRun(part, run.shift)


def _shown(mask: SequenceMask, queries: range, keys: range, finely: bool) -> Iterator[tuple[Verdict, range, range]]:
    """Yield what is shown; where that is a part of the pairs, strip by strip of queries, with neighbouring keys."""
    verdict = mask.classify(queries, keys)
    if verdict == "skip":
        return
    if verdict != "partial" and not finely:
        yield verdict, queries, keys
        return
    for strip in _split(queries):
        classified = [(_classify(mask, strip, part), part) for part in _split(keys)]
        for of_strip, neighbours in groupby(classified, key=lambda pair: pair[0]):
            parts = [part for _, part in neighbours]
            together = range(parts[0].start, parts[-1].stop)
            if of_strip == "partial":
                yield of_strip, strip, _seen(mask, strip, together)
            elif of_strip != "skip":
                yield of_strip, strip, together


def _split(run: range) -> Iterator[range]:
    return (run[start : start + DENSE_TILE] for start in range(0, len(run), DENSE_TILE))


def _classify(mask: SequenceMask, queries: range, keys: range) -> Verdict:
    """Return the verdict, with a look at the pairs where it is not clear."""
    verdict = mask.classify(queries, keys)
    if verdict != "partial":
        return verdict
    seen = mask.attends(_positions(queries), _positions(keys))
    if seen.all():
        return "full"
    return "partial" if seen.any() else "skip"


def _seen(mask: SequenceMask, queries: range, keys: range) -> range:
    """Return the keys without those at both ends that no query sees."""
    seen = mask.attends(_positions(queries), _positions(keys)).flatten(0, 1).any(0).nonzero()
    return keys[int(seen[0]) : int(seen[-1]) + 1]


def _masked_tile(
    mask: SequenceMask,
    verdict: Verdict,
    queries: range,
    keys: range,
    query_shift: int,
    key_shift: int,
    device: torch.device | str,
) -> Tiles:
    if verdict != "partial":
        return tile_at(queries, keys, query_shift, key_shift, causal=verdict == "causal")
    masked = ~mask.attends(_positions(queries, device), _positions(keys, device)).unsqueeze(1)
    fully_masked = masked.all(-1)
    return tile_at(
        queries, keys, query_shift, key_shift, masked=masked, fully_masked=fully_masked if fully_masked.any() else None
    )


def _positions(run: range, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(run.start, run.stop, device=device)


def _by_order(queries: range, keys: range) -> Verdict:
    if keys.start >= queries.stop:
        return "skip"
    return "causal" if queries == keys else _full_or_partial(queries, keys)


def _full_or_partial(queries: range, keys: range) -> Verdict:
    return "full" if keys.stop - 1 <= queries.start else "partial"


def _by_pattern(pattern: AttentionPattern, queries: range, keys: range) -> Verdict:
    if pattern.kind == "full":
        return "full"
    if pattern.kind == "causal" or keys.stop <= pattern.text_length or keys.start >= queries.stop:
        return _by_order(queries, keys)
    nearest = queries.start - (keys.stop - 1)
    return "skip" if keys.start >= pattern.text_length and nearest > pattern.reach else "partial"
