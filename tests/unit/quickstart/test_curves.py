import re
import xml.etree.ElementTree as ElementTree

from lightning_dalle.quickstart.curves import PANELS, draw_panels
from lightning_dalle.quickstart.settings import TRAINED_STAGES

CURVES = {"train/loss": {0: 3.0, 10: 1.0}, "val/loss": {10: 1.5}, "train/accuracy": {0: 0.1}}


def test_every_stage_of_training_has_panels() -> None:
    assert set(PANELS) == {stage for stages in TRAINED_STAGES.values() for stage in stages}


def test_drawings_are_elements_in_the_colours_of_the_page() -> None:
    loss, accuracy = draw_panels("contrastive", CURVES)
    ElementTree.fromstring(loss)
    assert "currentColor" in loss
    assert "var(--accent)" in loss
    assert "var(--second)" in loss
    assert "var(--second)" not in accuracy
    assert not re.search(r"#01020\d|DOCTYPE|DejaVu|<metadata", loss)


def test_panels_without_values_are_left_out() -> None:
    assert len(draw_panels("discrete_vae", CURVES)) == 1
    assert draw_panels("text_to_image", CURVES) == []


def test_definitions_of_two_drawings_do_not_clash() -> None:
    loss, accuracy = draw_panels("contrastive", CURVES)
    clips = [set(re.findall(r'clipPath id="([^"]+)"', drawing)) for drawing in (loss, accuracy)]
    assert not clips[0] & clips[1]
