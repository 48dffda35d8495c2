"""Batches by token count: all data once, nothing too large, and a report of what became of it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.data.files.bucketing import TokenBuckets, pad_clip

Size = tuple[int, int, int]
sizes = st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=30)
BUCKETS: list[Size] = [(4, 4, 4), (2, 4, 4), (1, 2, 2)]


@settings(max_examples=50, deadline=None)
@given(sizes=sizes, packed=st.booleans(), max_tokens=st.integers(64, 200), epoch=st.integers(0, 5))
def test_batches_cover_all_data_once_within_the_tokens(
    sizes: list[Size], packed: bool, max_tokens: int, epoch: int
) -> None:
    buckets = TokenBuckets(sizes, max_tokens=max_tokens, buckets=None if packed else BUCKETS, seed=3)
    buckets.set_epoch(epoch)
    batches = list(buckets)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert len(batches) == len(buckets)
    assert batches == list(buckets)
    for batch in batches:
        videos = [torch.zeros(3, *sizes[index], dtype=torch.uint8) for index in batch]
        collated = buckets.collate([{"video": video, "caption": str(video.shape)} for video in videos])["video"]
        if packed:
            assert [tuple(video.shape[1:]) for video in collated] == [sizes[index] for index in batch]
        assert sum(math.prod(video.shape[1:]) for video in collated) <= max_tokens


def test_packed_batches_are_filled_and_shuffled_by_epoch() -> None:
    buckets = TokenBuckets([(2, 2, 2)] * 64, max_tokens=32)
    assert [len(batch) for batch in buckets] == [4] * 16
    first = list(buckets)
    buckets.set_epoch(1)
    assert list(buckets) != first


def test_tokens_count_what_is_begun() -> None:
    buckets = TokenBuckets([(3, 8, 8)] * 2, max_tokens=16, token_size=(2, 4, 4))
    assert [len(batch) for batch in buckets] == [2]
    assert [len(batch) for batch in TokenBuckets([(3, 8, 8)] * 2, max_tokens=15, token_size=(2, 4, 4))] == [1, 1]


def test_report_says_what_each_bucket_took_padded_and_dropped() -> None:
    sizes: list[Size] = [(2, 4, 4), (2, 4, 3), (1, 1, 2), (5, 1, 1)]
    buckets = TokenBuckets(sizes, max_tokens=40, buckets=BUCKETS)
    assert buckets.report().splitlines() == [
        "1 x 2 x 2: 1 taken, 1 of them padded, 0 dropped",
        "2 x 4 x 4: 2 taken, 1 of them padded, 0 dropped",
        "5 x 1 x 1: 0 taken, 0 of them padded, 1 dropped",
    ]
    assert sorted(index for batch in buckets for index in batch) == [0, 1, 2]


def test_padding_repeats_the_last_frames_rows_and_columns() -> None:
    clip = torch.arange(8).view(1, 2, 2, 2)
    padded = pad_clip(clip, (3, 2, 4))
    assert padded.shape == (1, 3, 2, 4)
    assert torch.equal(padded[:, :2, :, :2], clip)
    assert torch.equal(padded[:, 2], padded[:, 1])
    assert torch.equal(padded[..., 3], clip[:, [0, 1, 1], :, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens \(0\)"),
        ({"max_tokens": 8, "token_size": (1, 0, 1)}, r"token_size \(1, 0, 1\) must be at least 1"),
        ({"max_tokens": 8, "seed": -1}, r"seed \(-1\)"),
        ({"max_tokens": 4}, r"no batch is left of 2 clips; raise max_tokens \(4\).\n2 x 2 x 2: 0 taken.*2 dropped"),
        ({"max_tokens": 99, "buckets": [(1, 2, 2)]}, "no batch is left of 2 clips"),
    ],
)
def test_bad_settings_and_zero_batches_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBuckets([(2, 2, 2)] * 2, **settings)


@settings(max_examples=30, deadline=None)
@given(sizes=sizes, packed=st.booleans(), epoch=st.integers(1, 9))
def test_all_epochs_have_equally_many_batches(sizes: list[Size], packed: bool, epoch: int) -> None:
    buckets = TokenBuckets(sizes, max_tokens=64, buckets=None if packed else BUCKETS)
    lengths = [len(list(buckets))]
    buckets.sampler.set_epoch(epoch)
    lengths.append(len(list(buckets)))
    assert lengths == [len(buckets)] * 2


def test_without_shuffling_clips_come_in_their_order() -> None:
    packed = TokenBuckets([(2, 2, 2)] * 9, max_tokens=32, shuffle=False)
    assert list(packed) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [packed[number] for number in range(3)] == list(packed)


def test_what_goes_with_the_clips_is_collated() -> None:
    samples = [{"video": torch.zeros(3, 1, 2, 2), "caption": "red", "text_tokens": torch.arange(4)}] * 2
    batch = TokenBuckets([(1, 2, 2)] * 2, max_tokens=8).collate(samples)
    assert batch["caption"] == ["red", "red"]
    assert torch.equal(batch["text_tokens"], torch.arange(4).expand(2, 4))
