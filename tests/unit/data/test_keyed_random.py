import numpy as np
import pytest

from lightning_dalle.ops.random import check_seed, keyed_numpy_generator


def test_a_key_always_gives_the_same_stream_and_another_key_another() -> None:
    keys = [(0, 1, 2), (0, 1, 2), (1, 0, 2), (0, 1, 3), (0, 1, 2, 1)]
    draws = [keyed_numpy_generator(*key).integers(2**62) for key in keys]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4


def test_streams_of_neighbouring_keys_are_uniform() -> None:
    first = np.array([keyed_numpy_generator(0, epoch, index).random() for epoch in range(20) for index in range(100)])
    # 2,000 uniform numbers: the mean deviates by .0065.
    assert first.mean() == pytest.approx(0.5, abs=0.03)


def test_a_negative_seed_is_refused() -> None:
    assert check_seed(0) == 0
    with pytest.raises(ValueError, match=r"seed \(-1\) must be at least 0"):
        check_seed(-1)
