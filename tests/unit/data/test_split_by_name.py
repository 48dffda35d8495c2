import numpy as np
import pytest

from lightning_dalle.data.splits import check_val_share, hash_unit, validation_mask


def test_the_split_depends_on_names_alone() -> None:
    names = [f"image {number}" for number in range(4000)]
    mask = validation_mask(names, 0.05)
    # 4,000 draws of chance .05: deviation .0034.
    assert mask.mean() == pytest.approx(0.05, abs=0.015)
    np.testing.assert_array_equal(validation_mask(names[::-1], 0.05)[::-1], mask)
    assert not validation_mask([name for name, chosen in zip(names, mask, strict=True) if not chosen], 1e-9)[1:].all()


def test_hashes_are_the_same_on_every_machine() -> None:
    assert hash_unit("grinning face") == pytest.approx(0.31676655094796874, rel=1e-12)
    assert 0 <= hash_unit("\ud800") < 1


@pytest.mark.parametrize("val_share", [1e-9, 1 - 1e-9])
def test_both_splits_have_a_sample(val_share: float) -> None:
    assert validation_mask(["a", "b"], val_share).sum() == 1


def test_a_split_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 samples cannot be split"):
        validation_mask(["a"], 0.5)
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=rf"val_share \({share}\) must be above 0 and below 1"):
            check_val_share(share)
