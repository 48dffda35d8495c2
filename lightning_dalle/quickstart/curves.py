"""Training curves as drawings that take the colours of the page."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from lightning_dalle.quickstart.evaluation import Curves

# Stand-ins that no drawing needs otherwise, replaced by the page's own colours.
_COLOURS = {"#010203": "currentColor", "#010204": "var(--accent)", "#010205": "var(--second)"}
_INK, *_LINES = _COLOURS


@dataclass(frozen=True)
class Panel:
    """One small drawing.

    Args:
        title: With the unit.
        lines: Logged value -> its name in the drawing; those that were not logged are left out.
    """

    title: str
    lines: Mapping[str, str]


PANELS: dict[str, Sequence[Panel]] = {
    "discrete_vae": (
        Panel("Loss, nats per pixel value", {"train/loss": "training"}),
        Panel("PSNR of hard codes, dB", {"val/psnr": "validation"}),
        Panel("Codes in use, of the codebook", {"val/codes_used": "used", "val/code_perplexity": "perplexity"}),
    ),
    "contrastive": (
        Panel("Contrastive loss, nats", {"train/loss": "training", "val/loss": "validation"}),
        Panel("Accuracy within a batch", {"train/accuracy": "training", "val/accuracy": "validation"}),
    ),
    "text_to_image": (
        Panel("Image tokens, nats each", {"train/image_loss": "training", "val/image_loss": "validation"}),
        Panel("Text tokens, nats each", {"train/text_loss": "training", "val/text_loss": "validation"}),
    ),
    "video_dit": (
        Panel("Squared error of the velocity", {"train/loss": "training", "val/loss": "validation"}),
        Panel("Clips read back: what is shown", {"val/oracle_colour": "colour", "val/oracle_shape": "shape"}),
        Panel("Clips read back: how it moves", {"val/oracle_axis": "axis", "val/oracle_direction": "direction"}),
    ),
}


def draw_panels(stage: str, curves: Curves) -> list[str]:
    """Return the drawings of a stage as SVG elements; panels without any logged value are left out."""
    panels = [panel for panel in PANELS[stage] if any(curves.get(name) for name in panel.lines)]
    return [_draw(panel, curves, f"{stage}-{number}") for number, panel in enumerate(panels)]


def _draw(panel: Panel, curves: Curves, name: str) -> str:
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "axes.formatter.useoffset": False,
        "font.family": "sans-serif",
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    }
    with matplotlib.rc_context(style):
        drawing = Drawing(figsize=(3.6, 2.3), layout="constrained")
        axes = drawing.subplots()
        for colour, (key, label) in zip(_LINES, panel.lines.items(), strict=False):
            if curves.get(key):
                _plot(axes, curves[key], label, colour)
        axes.set_title(panel.title, loc="left", fontsize=9)
        axes.set_xlabel("updates")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_INK, alpha=0.12)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
        return _as_element(drawing, panel.title)


def _plot(axes: Axes, curve: Mapping[int, float], label: str, colour: str) -> None:
    few = len(curve) <= 20
    marker = "o" if few else ""
    axes.plot(list(curve), list(curve.values()), label=label, color=colour, linewidth=1.3, marker=marker, markersize=3)


def _as_element(drawing: Drawing, title: str) -> str:
    """SVG to stand within a page: without the document's head, and in the page's colours and type."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for stand_in, colour in _COLOURS.items():
        text = text.replace(stand_in, colour)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    # Versions of matplotlib write the font as one property or as several.
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*; ", "", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
