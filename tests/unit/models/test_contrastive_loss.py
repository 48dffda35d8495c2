import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_dalle.models.contrastive import RepeatedCaptionClipLoss

SCALE = torch.tensor(5.0)


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image_features, text_features = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    return normalize(image_features, dim=1), normalize(text_features, dim=1)


def test_without_repeats_the_loss_is_that_of_open_clip(features: tuple[Tensor, Tensor]) -> None:
    loss, _ = RepeatedCaptionClipLoss()(*features, SCALE, torch.arange(4).unsqueeze(1))
    assert torch.equal(loss, open_clip.ClipLoss()(*features, SCALE))


def test_repeats_are_no_negatives(features: tuple[Tensor, Tensor]) -> None:
    tokens = torch.tensor([[1, 2], [3, 0], [1, 2], [4, 0]])
    loss, _ = RepeatedCaptionClipLoss()(*features, SCALE, tokens)
    logits = SCALE * features[0] @ features[1].T
    expected = torch.tensor(0.0, dtype=torch.float64)
    for row in range(4):
        rivals = [column for column in range(4) if column == row or not torch.equal(tokens[row], tokens[column])]
        expected -= logits[row, row] - logits[row, rivals].logsumexp(dim=0)
        expected -= logits[row, row] - logits[rivals, row].logsumexp(dim=0)
    torch.testing.assert_close(loss, expected / 8)


def test_batch_of_one_caption_gives_no_gradient(features: tuple[Tensor, Tensor]) -> None:
    image_features = features[0].requires_grad_()
    loss, accuracy = RepeatedCaptionClipLoss()(image_features, features[1], SCALE, torch.ones(4, 1, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert accuracy == 1
    assert image_features.grad is not None
    assert not image_features.grad.any()


def test_an_image_s_own_negative_joins_its_softmax_alone(features: tuple[Tensor, Tensor]) -> None:
    negatives = normalize(torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    tokens = torch.arange(4).unsqueeze(1)
    loss, accuracy = RepeatedCaptionClipLoss()(*features, SCALE, tokens, torch.tensor(3.0), negatives)
    logits = SCALE * features[0] @ features[1].T
    expected = torch.tensor(0.0, dtype=torch.float64)
    for row in range(4):
        rivals = torch.cat([logits[row], SCALE * (features[0][row] @ negatives[row]).reshape(1)])
        expected -= logits[row, row] - rivals.logsumexp(dim=0)
        expected -= logits[row, row] - logits[:, row].logsumexp(dim=0)
    torch.testing.assert_close(loss, expected / 8)
    assert accuracy == RepeatedCaptionClipLoss()(*features, SCALE, tokens)[1]


def test_accuracy_counts_the_best_caption_whichever_image_it_came_with() -> None:
    features = torch.eye(3)
    swapped = features[[1, 0, 2]]
    # Images 0 and 1 find each other's text, which is the same caption; then that of another.
    _, same = RepeatedCaptionClipLoss()(features, swapped, SCALE, torch.tensor([[7], [7], [8]]))
    _, other = RepeatedCaptionClipLoss()(features, swapped, SCALE, torch.tensor([[6], [7], [8]]))
    assert same == 1
    torch.testing.assert_close(other, torch.tensor(1 / 3))


def test_bias_of_the_logits_changes_nothing_in_a_softmax(features: tuple[Tensor, Tensor]) -> None:
    tokens = torch.arange(4).unsqueeze(1)
    loss, _ = RepeatedCaptionClipLoss()(*features, SCALE, tokens)
    biased, _ = RepeatedCaptionClipLoss()(*features, SCALE, tokens, torch.tensor(-10.0))
    torch.testing.assert_close(biased, loss)
