"""What is measured on pictures, whatever the data."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_dalle.quickstart.figures import Figure, mean_psnr
from lightning_dalle.quickstart.pictures import RankedPictures


@dataclass(frozen=True)
class Prompts:
    """A section of the report: captions with their candidates.

    Args:
        title: Of the section.
        description: What the captions and marks are.
        pictures: Best first.
        marks: Whether each candidate is what it should be.
        originals: For captions of the training set, the pictures that bear them.
    """

    title: str
    description: str
    pictures: RankedPictures
    marks: Tensor
    originals: Tensor | None = None


@dataclass
class Judgement:
    """All that one data set's scoring gives."""

    figures: list[Figure] = field(default_factory=list)
    prompts: list[Prompts] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def best_of_figures(
    marks: Tensor, *, key: str, label: str, what: str, target: float, num_candidates: int
) -> list[Figure]:
    """Shares of right pictures: of the first of each row, of all, and of rows with any.

    Args:
        marks: Boolean [captions, candidates], best candidate first.
        what: When a picture is right, in words that follow `share of captions whose ... `.
    """
    best, mean, any_right = (
        float(marks[:, 0].double().mean()),
        float(marks.double().mean()),
        float(marks.any(dim=1).double().mean()),
    )
    n = len(marks)
    chosen = f"the picture that the reranker puts first of {num_candidates}"
    return [
        Figure(
            key=f"{key}_best_of_{num_candidates}",
            label=f"{label}: best of {num_candidates}",
            definition=f"Share of {n} captions where {chosen} {what}.",
            value=best,
            n=n,
            target=target,
            unit="%",
        ),
        Figure(
            key=f"{key}_gain_of_reranking",
            label=f"{label}: gain of reranking",
            definition=f"The share above, less that of all {num_candidates} pictures of each caption ({mean:.1%}).",
            value=best - mean,
            n=n,
            # Nothing can be gained where all pictures are right.
            target=0.0 if mean < 1 else None,
            strict=True,
            unit="points",
        ),
        Figure(
            key=f"{key}_mean_of_{num_candidates}",
            label=f"{label}: mean of {num_candidates}",
            definition=f"Share of all {marks.numel()} pictures where the picture {what}.",
            value=mean,
            n=marks.numel(),
            unit="%",
        ),
        Figure(
            key=f"{key}_any_of_{num_candidates}",
            label=f"{label}: any of {num_candidates}",
            definition=f"Share of {n} captions where any of the {num_candidates} pictures {what}: the best that a "
            "reranker could do.",
            value=any_right,
            n=n,
            unit="%",
        ),
    ]


def reconstruction_figures(
    originals: dict[str, Tensor], reconstructions: dict[str, Tensor], target: float | None
) -> list[Figure]:
    """Signal-to-noise ratios of reconstructions by split; the target is that of the first."""
    return [
        Figure(
            key=f"reconstruction_psnr_{split}",
            label=f"Reconstruction PSNR, {'validation' if split == 'val' else 'training'}",
            definition="Peak signal-to-noise ratio of each picture after the code and back, averaged over pictures.",
            value=mean_psnr(reconstructions[split], images),
            n=len(images),
            target=target if position == 0 else None,
            unit="dB",
        )
        for position, (split, images) in enumerate(originals.items())
    ]
