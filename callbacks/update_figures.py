"""The figures of one update."""

from contextlib import ExitStack

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dalle.callbacks.gradient_statistics import (
    gradient_figures,
    largest_activations,
    parameters_by_block,
    samples,
    update_ratios,
)
from lightning_dalle.callbacks.loss_scale_sources import LossScaleSource


class UpdateFigures:
    """Looks at one update, from before its first forward pass until after it."""

    def __init__(self, pl_module: LightningModule, source: LossScaleSource) -> None:
        blocks = source.blocks()
        self._groups = parameters_by_block(pl_module, blocks)
        self._stack = ExitStack()
        self._activations = self._stack.enter_context(largest_activations(blocks))
        self._gradients: dict[str, dict[str, float]] = {}
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Look at the gradients, and keep what the parameters are."""
        self._stack.close()
        self._gradients = gradient_figures(self._groups)
        self._before = samples(self._groups)

    def after_step(self) -> dict[str, dict[str, float]]:
        """Return the figures, each by block."""
        by_figure: dict[str, dict[str, float]] = {}
        for block, figures in self._gradients.items():
            for figure, value in figures.items():
                by_figure.setdefault(figure, {})[block] = value
        by_figure["update_ratio"] = update_ratios(self._before, samples(self._groups))
        by_figure["largest_activation"] = {name: value.item() for name, value in self._activations.items()}
        return by_figure
