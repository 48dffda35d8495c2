"""Use of a codebook."""

import torch

from lightning_dalle.lightning_modules.discrete_vae_module import CodebookUse


def test_equal_use_of_every_code_has_the_perplexity_of_the_codebook() -> None:
    metric = CodebookUse(8)
    metric.update(torch.arange(8).view(2, 4))
    use = metric.compute()
    assert use["codes_used"] == 8
    torch.testing.assert_close(use["code_perplexity"], torch.tensor(8.0))


def test_batches_add_up_and_reset_forgets_them() -> None:
    metric = CodebookUse(8)
    metric.update(torch.zeros(3, dtype=torch.int64))
    metric.update(torch.ones(3, dtype=torch.int64))
    assert {name: round(value.item(), 5) for name, value in metric.compute().items()} == {
        "codes_used": 2,
        "code_perplexity": 2,
    }
    metric.reset()
    metric.update(torch.full((5,), 7))
    assert metric.compute()["codes_used"] == metric.compute()["code_perplexity"] == 1


def test_counts_of_ranks_are_summed() -> None:
    ranks = [CodebookUse(4), CodebookUse(4)]
    for rank, metric in enumerate(ranks):
        metric.update(torch.tensor([rank, 3]))
    ranks[0].merge_state(ranks[1])
    assert ranks[0].counts.tolist() == [1, 1, 0, 2]
