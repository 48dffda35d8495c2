import torch

from lightning_dalle.ops.token_sampling import replace_tokens


def test_the_share_is_replaced_by_tokens_of_the_whole_vocabulary() -> None:
    tokens = torch.full((200, 50), 3)
    noisy = replace_tokens(tokens, 0.3, 5, torch.Generator().manual_seed(0))
    assert (tokens == 3).all()
    assert noisy.unique().tolist() == [0, 1, 2, 3, 4]
    # One of five draws is the token itself: .24 of 10,000, deviation .0043.
    assert abs((noisy != tokens).double().mean() - 0.24) < 0.02


def test_none_and_all_may_be_replaced() -> None:
    tokens, generator = torch.arange(1000) % 7 + 100, torch.Generator().manual_seed(0)
    assert torch.equal(replace_tokens(tokens, 0.0, 50, generator), tokens)
    assert (replace_tokens(tokens, 1.0, 50, generator) < 50).all()


def test_the_generator_decides() -> None:
    tokens = torch.zeros(4, 9, dtype=torch.long)
    first, same, other = (replace_tokens(tokens, 0.5, 9, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
