"""Masks over positions: verdicts on blocks against the pairs themselves."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from lightning_dalle.ops.attention.patterns import AttentionPattern
from tests.distributed.sequences import LENGTH, MASKS

runs = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 60)).map(
    lambda pair: range(pair[0], min(pair[0] + pair[1], LENGTH))
)


@given(st.sampled_from(sorted(MASKS)), runs, runs, st.booleans())
@settings(max_examples=400, deadline=None)
def test_verdict_is_what_the_pairs_say(name: str, queries: range, keys: range, same: bool) -> None:
    keys = queries if same else keys
    mask = MASKS[name]
    seen = mask.attends(torch.tensor(queries), torch.tensor(keys))
    match mask.classify(queries, keys):
        case "skip":
            assert not seen.any()
        case "full":
            assert seen.all()
        case "causal":
            assert torch.equal(seen, torch.ones(seen.shape, dtype=torch.bool).tril())


@pytest.mark.parametrize("kind", ["causal", "full", "row"])
def test_patterns_are_their_own_masks(kind: str) -> None:
    pattern = AttentionPattern(kind, 5, 3, 4)  # type: ignore[arg-type]
    positions = torch.arange(pattern.length)
    assert torch.equal(SequenceMask(pattern).attends(positions, positions)[0], pattern.mask())


def test_prefix_is_seen_by_all_and_sees_no_future() -> None:
    seen = SequenceMask(prefix_length=2).attends(torch.arange(4), torch.arange(4))[0]
    assert seen.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_what_hides_most_blocks_skips_them() -> None:
    early, late = range(40), range(250, 290)
    assert MASKS["causal"].classify(early, late) == "skip"
    assert MASKS["causal"].classify(late, late) == "causal"
    assert MASKS["causal"].classify(late, early) == "full"
    assert MASKS["row"].classify(late, range(40, 80)) == "skip"
    assert MASKS["row"].classify(late, range(31)) == "full"
    assert MASKS["document_ids"].classify(late, early) == "skip"
    assert MASKS["document_ids"].classify(late, late) == "causal"
    assert MASKS["padding_in_front"].classify(late, range(1)) == "skip"


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule \('row'\) must be 'causal', 'bidirectional' or an AttentionPattern"):
        SequenceMask("row")  # type: ignore[arg-type]
    for rule, length in (("bidirectional", 3), ("causal", -1)):
        with pytest.raises(ValueError, match=rf"prefix_length \({length}\) must be at least 0, and 0 unless rule is"):
            SequenceMask(rule, prefix_length=length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"document_ids has {LENGTH} positions, but the sequence has length 8"):
        MASKS["document_ids"].check_length(8)
    with pytest.raises(ValueError, match="rule has 301 positions"):
        MASKS["row"].check_length(302)
