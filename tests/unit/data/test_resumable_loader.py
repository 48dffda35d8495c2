import logging
from ast import literal_eval
from itertools import islice

import pytest
from torch.utils.data import Dataset, RandomSampler

from lightning_dalle.data.loader import KeyedSampler, ResumableLoader


class Keys(Dataset):
    """Gives back its key, as text."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, key: tuple[int, int]) -> str:
        return str(key)


def loader(num_replicas: int = 1, rank: int = 0, batch_size: int = 4, seed: int = 0) -> ResumableLoader:
    sampler = KeyedSampler(Keys(), num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
    return ResumableLoader(Keys(), batch_size=batch_size, sampler=sampler, drop_last=True)


def epoch_of(resumable: ResumableLoader, epoch: int) -> list[list[str]]:
    resumable.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return list(resumable)


def test_samples_are_keyed_by_epoch_and_index_in_a_new_order_each_epoch() -> None:
    first, second = ([literal_eval(key) for batch in epoch_of(loader(), epoch) for key in batch] for epoch in (0, 1))
    assert {epoch for epoch, _ in first} == {0}
    assert {epoch for epoch, _ in second} == {1}
    assert len({index for _, index in first}) == 20
    assert [index for _, index in first] != [index for _, index in second]
    assert epoch_of(loader(seed=1), 0) != epoch_of(loader(), 0)


def test_ranks_get_equally_many_different_samples() -> None:
    shares = [[key for batch in epoch_of(loader(3, rank, 2), 5) for key in batch] for rank in range(3)]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert len(set().union(*shares)) == 18


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_a_state_continues_after_the_batches_handed_out(epoch: int, done: int) -> None:
    whole, interrupted, continued = loader(), loader(), loader()
    interrupted.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    list(islice(interrupted, done))
    continued.load_state_dict(interrupted.state_dict() if done else {**interrupted.state_dict(), "epoch": epoch})
    assert epoch_of(continued, epoch) == epoch_of(whole, epoch)[done:]
    assert epoch_of(continued, epoch + 1) == epoch_of(whole, epoch + 1)


def test_a_loaded_state_is_its_own_state_before_and_after_the_first_batch() -> None:
    state = {"epoch": 3, "num_batches": 2, "batch_size": 4, "num_replicas": 1}
    continued = loader()
    continued.load_state_dict(state)
    assert continued.state_dict() == state
    continued.sampler.set_epoch(3)  # type: ignore[attr-defined]
    next(iter(continued))
    assert continued.state_dict() == {**state, "num_batches": 3}


def test_the_length_is_that_of_the_whole_epoch() -> None:
    continued = loader()
    continued.load_state_dict({"epoch": 0, "num_batches": 2, "batch_size": 4, "num_replicas": 1})
    assert len(continued) == 5


@pytest.mark.parametrize("other", [{"num_replicas": 2}, {"batch_size": 3}])
def test_another_batch_size_or_number_of_ranks_warns(other: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    state = loader().state_dict()
    with caplog.at_level(logging.WARNING):
        loader().load_state_dict(state)
        assert caplog.text == ""
        loader(**other).load_state_dict(state)
    assert "with batch_size 4 on 1 ranks, now" in caplog.text


def test_a_replaced_sampler_starts_the_epoch_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    replaced = ResumableLoader(Keys(), batch_size=4, sampler=RandomSampler(Keys()), drop_last=True)
    replaced.load_state_dict(loader().state_dict())
    assert "overfit_batches has replaced the sampler" in caplog.text
    assert len(list(replaced)) == 5
