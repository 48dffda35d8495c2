"""How clips of animated emoji are judged: by the clip of the set that they resemble most, and by how much moves."""

import torch

from lightning_dalle.data.animated_emoji import AnimatedEmoji
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.quickstart.figures import Figure
from lightning_dalle.quickstart.judgement import Judgement, Prompts
from lightning_dalle.quickstart.motion_figures import motion_figures
from lightning_dalle.quickstart.pictures import draw_clips, split_samples, training_prompts
from lightning_dalle.quickstart.settings import Sampling


def judge_animated_emoji(module: VideoDiTModule, data: AnimatedEmoji, sampling: Sampling) -> Judgement:
    """Measure clips of training captions: whether they are the emoji that was asked for, and whether they move."""
    clips, all_captions = split_samples(data, "all")
    captions = training_prompts(data, sampling)
    drawn = draw_clips(module, captions, sampling)
    originals = clips[[all_captions.index(caption) for caption in captions]]
    flat = drawn.images.flatten(0, 1)
    nearest = torch.cdist(flat.flatten(1).float(), clips.flatten(1).float()).argmin(dim=1)
    marks = drawn.bear_caption(nearest, all_captions)
    judgement = Judgement()
    judgement.figures.append(
        Figure(
            key="caption_match",
            label="Training captions: the right emoji",
            definition=f"Share of sampled clips whose nearest clip of all {len(clips)}, pixel by pixel, bears the "
            "caption.",
            value=float(marks.double().mean()),
            n=marks.numel(),
            unit="%",
        )
    )
    judgement.figures += motion_figures(flat, originals)
    description = (
        "Captions that were trained on, beside their clip of the training set. A mark tells whether the nearest clip "
        "of the whole set, pixel by pixel, bears the caption."
    )
    judgement.prompts.append(Prompts("Training captions", description, drawn, marks, originals))
    return judgement
