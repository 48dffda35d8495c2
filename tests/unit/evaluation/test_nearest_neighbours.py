import pytest
import torch

from lightning_dalle.evaluation.scores import caption_match_share, nearest_neighbours


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


def test_share_of_matching_captions() -> None:
    reference = torch.eye(3)
    features = torch.tensor([[1.0, 0.1, 0.0], [0.0, 0.1, 1.0]])
    assert caption_match_share(features, ["cat", "dog"], reference, ["cat", "dog", "fox"]) == 0.5


def test_an_equal_caption_of_another_image_matches() -> None:
    assert caption_match_share(torch.tensor([[0.0, 1.0]]), ["cat"], torch.eye(2), ["cat", "cat"]) == 1.0


@pytest.mark.parametrize(("captions", "argument"), [(["cat"], "features"), (["cat", "dog"], "reference")])
def test_share_refuses_images_without_a_caption_each(captions: list[str], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        caption_match_share(torch.eye(2), captions, torch.eye(2), ["cat"])


def test_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"features \(0 images\)"):
        caption_match_share(torch.empty(0, 2), [], torch.eye(2), ["cat", "dog"])
