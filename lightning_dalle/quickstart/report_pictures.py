"""The report's sections that show pictures."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from lightning_dalle.evaluation.logging import encode_animation

NUM_HERO, NUM_OPEN = 16, 12
"""Pictures at the top of the report, and captions of a kind that are shown before a click."""


def hero(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the best pictures of different captions, from each kind of captions in turn."""
    share = -(-NUM_HERO // len(groups))
    best = [
        (prompts["captions"][index], prompts["images"][index, 0])
        for prompts in groups
        for index in _first_of_each_caption(prompts["captions"])[:share]
    ]
    return _strip("hero", [_figure(image, caption) for caption, image in best])


def prompts(group: Mapping[str, Any]) -> str:
    """Return captions with their candidates, best to worst; each caption once before a click, then the rest."""
    first = _first_of_each_caption(group["captions"])[:NUM_OPEN]
    rest = [index for index in range(len(group["captions"])) if index not in first]
    shown = "\n".join(_prompt(group, index) for index in first)
    hidden = "\n".join(_prompt(group, index) for index in rest)
    more = f'<details><summary>{len(rest)} more</summary><div class="prompts">{hidden}</div></details>' if rest else ""
    ranking = (
        ""
        if group["scores"] is None
        else "Candidates stand best to worst by the reranker; the number is the cosine of picture and caption."
    )
    return f"""<h2>{html.escape(group["title"])}</h2>
<p class="quiet">{html.escape(group["description"])} {ranking}</p>
<div class="prompts">{shown}</div>
{more}"""


def samples(pictures: Mapping[str, Any]) -> str:
    """Training pictures with their captions."""
    pairs = zip(pictures["samples"], pictures["sample_captions"], strict=True)
    shown = [_figure(image, caption) for image, caption in pairs]
    return "<h2>Data</h2>\n" + _strip("", shown)


def reconstructions(pictures: Mapping[str, Any]) -> str:
    """Validation pictures over what their codes keep of them, where there are codes."""
    if "originals" not in pictures:
        return ""
    pairs = zip(pictures["originals"], pictures["reconstructions"], strict=True)
    drawings = [
        f"<figure>{_image(original, 'original')}{_image(reconstruction, 'reconstruction')}</figure>"
        for original, reconstruction in pairs
    ]
    return f"""<h2>Reconstructions</h2>
<p class="quiet">Validation pictures above, and below what the discrete VAE’s codes keep of them: the transformer can
draw no better than this.</p>
{_strip("pairs", drawings)}"""


def data_uri(image: UInt8[Tensor, "3 *size"]) -> str:
    """Return a picture as a PNG within the page, or a clip as an animated WebP."""
    if image.ndim == 4:
        return "data:image/webp;base64," + base64.b64encode(encode_animation(image)).decode("ascii")
    buffer = io.BytesIO()
    to_pil_image(image).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _prompt(group: Mapping[str, Any], index: int) -> str:
    images = group["images"][index]
    scores = [None] * len(images) if group["scores"] is None else group["scores"][index].tolist()
    parts = zip(images, scores, group["correct"][index].tolist(), strict=True)
    pictures = "".join(_candidate(image, score, mark) for image, score, mark in parts)
    candidates = f'<div class="candidates">{pictures}</div>'
    if group["originals"] is not None:
        original = _image(group["originals"][index], "the training picture")
        candidates = (
            f'<div class="beside"><figure>{original}<figcaption>trained</figcaption></figure>{candidates}</div>'
        )
    return f'<div class="prompt"><h4>{html.escape(group["captions"][index])}</h4>{candidates}</div>'


def _candidate(image: Tensor, score: float | None, mark: bool) -> str:
    number = "" if score is None else f" {score:.2f}"
    sign = '<span class="met">✓</span>' if mark else '<span class="missed">✗</span>'
    return f"<figure>{_image(image, 'candidate')}<figcaption>{sign}{number}</figcaption></figure>"


def _figure(image: Tensor, caption: str) -> str:
    return f"<figure>{_image(image, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _image(image: Tensor, description: str) -> str:
    return f'<img src="{data_uri(image)}" alt="{html.escape(description, quote=True)}">'


def _strip(kind: str, pictures: Sequence[str]) -> str:
    return f'<div class="strip {kind}">{"".join(pictures)}</div>'


def _first_of_each_caption(captions: Sequence[str]) -> list[int]:
    """Where captions stand for the first time."""
    return [index for index, caption in enumerate(captions) if caption not in captions[:index]]
