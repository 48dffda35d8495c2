"""Folding sequences by caption and back."""

import pytest
import torch

from lightning_dalle.ops.attention.kv_cache import SharedPrefixGroups


@pytest.mark.parametrize("captions", [[0], [0, 1, 2], [0, 0, 0], [0, 0, 1, 1], [2, 0, 1, 0, 0], [0, 1, 1, 1, 0, 2]])
def test_sequences_lie_with_their_caption_and_come_back_in_order(captions: list[int]) -> None:
    groups = SharedPrefixGroups(torch.tensor(captions))
    query = torch.arange(1.0, 1 + len(captions)).view(-1, 1, 1, 1).expand(-1, 2, 1, 3)
    folded = groups.fold(query)
    assert folded.shape == (max(captions) + 1, 2, max(map(captions.count, captions)), 3)
    for caption, queries in enumerate(folded[:, 0, :, 0].tolist()):
        members = [index + 1.0 for index, other in enumerate(captions) if other == caption]
        assert [number for number in queries if number] == members
    assert torch.equal(groups.unfold(folded), query)
    assert torch.equal(groups.unfold(folded[..., 0]), query[..., 0])
