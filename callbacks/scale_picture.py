"""The heat map of loss scales."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor


def scale_picture(history: Sequence[tuple[int, Mapping[str, float]]]) -> UInt8[Tensor, "3 height width"]:
    """Draw the binary logarithm of each block's scale, first block on top, over the updates that were looked at."""
    names = list(history[0][1])
    logarithms = torch.tensor([[scales[name] for name in names] for _, scales in history]).double().log2().T
    # A figure of its own, without pyplot, which keeps figures and chooses a window system.
    figure = Figure(figsize=(8, min(12, 1.5 + 0.2 * len(names))), layout="constrained")
    axes = figure.subplots()
    first, last = history[0][0], history[-1][0]
    picture = axes.imshow(
        logarithms.numpy(), aspect="auto", interpolation="nearest", extent=(first, max(last, first + 1), len(names), 0)
    )
    every = -(-len(names) // 32)
    axes.set_yticks([number + 0.5 for number in range(0, len(names), every)], names[::every], fontsize=7)
    axes.set_xlabel("update")
    figure.colorbar(picture, label="log2 of the scale")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba())[..., :3]).permute(2, 0, 1)
