"""How much moves in sampled clips, beside real ones."""

from jaxtyping import UInt8
from torch import Tensor

from lightning_dalle.evaluation.motion import frame_difference
from lightning_dalle.quickstart.figures import Figure

AGREEMENT_TARGET = 0.5


def motion_figures(
    generated: UInt8[Tensor, "generated 3 frames height width"], real: UInt8[Tensor, "real 3 frames height width"]
) -> list[Figure]:
    """The ratio of the mean frame differences, and how near it is to 1 from either side."""
    ratio = float(frame_difference(generated).mean() / frame_difference(real).mean())
    n = len(generated)
    return [
        Figure(
            key="motion_ratio",
            label="Motion, sampled to real",
            definition="Mean difference of neighbouring frames in sampled clips, over that in real clips.",
            value=ratio,
            n=n,
        ),
        Figure(
            key="motion_agreement",
            label="Motion, smaller to larger",
            definition="The ratio above or its inverse, whichever is below 1: 0.5 is a factor of 2.",
            value=min(ratio, 1 / ratio) if ratio > 0 else 0.0,
            n=n,
            target=AGREEMENT_TARGET,
        ),
    ]
