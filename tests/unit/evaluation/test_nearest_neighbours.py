import pytest
import torch

from lightning_dalle.evaluation.scores import nearest_neighbours


def test_equals_a_search_over_all_pairs_in_any_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    features, reference = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    cosines = torch.cosine_similarity(features.unsqueeze(1), reference.unsqueeze(0), dim=2)
    for max_batch in (1, 3, 100):
        index, cosine = nearest_neighbours(features, reference, max_batch=max_batch)
        assert torch.equal(index, cosines.argmax(dim=1))
        torch.testing.assert_close(cosine, cosines.max(dim=1).values)


def test_lengths_of_features_do_not_matter() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.0, 100.0]])
    index, _ = nearest_neighbours(torch.tensor([[1e-3, 0.0]]), reference)
    assert index.tolist() == [0]


def test_first_of_equal_references_is_taken() -> None:
    index, _ = nearest_neighbours(torch.ones(1, 2), torch.ones(3, 2))
    assert index.tolist() == [0]


def test_no_images_have_no_neighbours() -> None:
    index, cosine = nearest_neighbours(torch.empty(0, 2), torch.ones(3, 2))
    assert index.shape == cosine.shape == (0,)


def test_refuses_an_empty_reference() -> None:
    with pytest.raises(ValueError, match=r"reference \(0 images\)"):
        nearest_neighbours(torch.ones(1, 2), torch.empty(0, 2))
