"""How clips of moving shapes are judged: the oracle reads back what they show and how it moves."""

import random

from lightning_dalle.data.moving_shapes import MovingShapes
from lightning_dalle.data.moving_shapes_oracle import attribute_shares, matches_each
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.quickstart.figures import Figure
from lightning_dalle.quickstart.judgement import Judgement, Prompts
from lightning_dalle.quickstart.motion_figures import motion_figures
from lightning_dalle.quickstart.pictures import draw_clips, split_samples
from lightning_dalle.quickstart.settings import Sampling

TARGETS = {"colour": 0.95, "shape": 0.9, "axis": 0.85}
_LABELS = {
    "colour": "colour",
    "shape": "shape",
    "axis": "axis of motion",
    "direction": "direction (axis and sign)",
    "speed": "speed",
}
NUM_REAL_CLIPS = 200


def judge_moving_shapes(module: VideoDiTModule, data: MovingShapes, sampling: Sampling) -> Judgement:
    """Measure clips of held-out captions, and how much moves in them."""
    judgement = Judgement()
    captions = data.held_out_captions()
    captions = random.Random(sampling.seed).sample(captions, min(sampling.num_prompts, len(captions)))
    drawn = draw_clips(module, captions, sampling)
    flat, repeated = drawn.images.flatten(0, 1), drawn.repeated_captions
    marks = matches_each(flat, repeated)
    shares = {**attribute_shares(flat, repeated), "all": float(marks.double().mean())}
    judgement.figures += [_share_figure(name, share, len(flat)) for name, share in shares.items()]
    judgement.figures += motion_figures(flat, split_samples(data, "val", NUM_REAL_CLIPS)[0])
    description = (
        "Colour, shape, direction and speed of each caption never met in training. A mark tells whether the oracle "
        "reads all four back from the clip."
    )
    judgement.prompts.append(
        Prompts("Held-out captions", description, drawn, marks.unflatten(0, drawn.images.shape[:2]))
    )
    return judgement


def _share_figure(name: str, share: float, num_clips: int) -> Figure:
    what = "the whole caption" if name == "all" else f"the caption's {_LABELS[name]}"
    return Figure(
        key=f"oracle_{name}",
        label="Held-out captions: " + ("all of it" if name == "all" else _LABELS[name]),
        definition=f"Share of all sampled clips from which the oracle reads {what}.",
        value=share,
        n=num_clips,
        target=TARGETS.get(name),
        unit="%",
    )
