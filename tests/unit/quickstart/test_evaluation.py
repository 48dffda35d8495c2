import pytest
import torch

from lightning_dalle.quickstart.evaluation import best_of_metrics, reconstruction_metrics


def shares(correct: list[list[bool]]) -> dict[str, float]:
    metrics = best_of_metrics(
        torch.tensor(correct), key="pairs", label="Pairs", what="is right", target=0.6, num_candidates=2
    )
    return {metric.key: metric.value for metric in metrics}


def test_shares_of_best_mean_and_any_candidate() -> None:
    values = shares([[True, False], [True, False], [False, True], [False, False]])
    assert values == {
        "pairs_best_of_2": 0.5,
        "pairs_gain_of_reranking": 0.125,
        "pairs_mean_of_2": 0.375,
        "pairs_any_of_2": 0.75,
    }


def test_a_perfect_score_leaves_no_gain_to_ask_for() -> None:
    metrics = best_of_metrics(
        torch.ones(3, 2, dtype=torch.bool), key="k", label="l", what="is right", target=0.6, num_candidates=2
    )
    assert [metric.met for metric in metrics] == [True, None, None, None]


def test_the_target_of_reconstructions_is_that_of_the_first_split() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    splits = {"val": images, "train": images}
    reconstructions = {"val": images + 51, "train": images + 51}
    validation, training = reconstruction_metrics(splits, reconstructions, target=20.0)
    assert (validation.met, training.met) == (False, None)
    assert validation.value == pytest.approx(13.979, abs=1e-3)
    assert (validation.key, training.key) == ("reconstruction_psnr_val", "reconstruction_psnr_train")
