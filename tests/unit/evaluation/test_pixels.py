import pytest
import torch

from lightning_dalle.evaluation.features import as_uint8


def test_floats_are_clamped_and_rounded() -> None:
    # A plain conversion truncates .999 to 254 and wraps 1.004 to 0.
    floats = torch.tensor([-0.2, 0.0, 0.999, 1.004, 7.0, 254.5 / 255])
    assert as_uint8(floats).tolist() == [0, 0, 255, 255, 255, 254]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_grey_levels_survive_a_round_trip(dtype: torch.dtype) -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    if dtype == torch.bfloat16:
        # Its 8 bits of precision hold the lower half only.
        levels = levels[:128]
    assert torch.equal(as_uint8((levels.double() / 255).to(dtype)), levels)


def test_bytes_are_returned_as_they_are() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    assert as_uint8(levels) is levels


def test_other_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"images \(torch.int64\) must be uint8"):
        as_uint8(torch.zeros(3, dtype=torch.int64))
