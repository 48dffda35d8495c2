import pytest

from lightning_dalle.data.files.samples import rejects_caption, rejects_size


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("a dog on a beach", None),
        ("café au lait, très bon", None),
        ("photographed by my sister in our garden", None),
        ("the image of a city at 9 o'clock", None),
        ("three women posing on 5 bicycles", None),
        ("a dog", "short caption"),
        ("", "short caption"),
        ("собака на пляже", "caption not in English"),
        ("一 只 狗 在 海滩", "caption not in English"),
        ("photographed on 4 May 2012", "boilerplate caption"),
        ("Photo taken on 2013-05-04.", "boilerplate caption"),
        ("Uploaded by user1234 on 5/6/2010", "boilerplate caption"),
        ("img - 0012", "boilerplate caption"),
        ("1 2 3 4", "caption not in English"),
    ],
)
def test_captions_are_left_out_for_a_reason(caption: str, reason: str | None) -> None:
    assert rejects_caption(caption) == reason


def test_long_captions_are_filtered_in_no_time() -> None:
    assert rejects_caption("photo " * 5000 + "on 12") is None


@pytest.mark.parametrize(("size", "rejected"), [((100, 200), False), ((201, 100), True), ((100, 201), True)])
def test_aspect_ratios_are_between_a_half_and_two(size: tuple[int, int], rejected: bool) -> None:
    assert rejects_size(size, 2.0) is rejected
