"""What LossScaleMonitor costs off its turn, as a share of a training step, in processor time on one thread.

python -m tests.benchmarks.loss_scale_monitor
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_dalle.callbacks import LossScaleMonitor
from lightning_dalle.callbacks.loss_scale_sources import BlockScales
from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.plugins import PerBlockGradientScaling

# That of the recipe shapes/text_to_image.
NETWORK = SparseTransformerConfig(
    depth=4,
    num_heads=3,
    text_tokens=12,
    text_vocabulary_size=512,
    grid_height=8,
    grid_width=8,
    image_vocabulary_size=192,
)


def _seconds(function: Callable[[], None], rounds: int) -> float:
    function()
    start = time.process_time()
    for _ in range(rounds):
        function()
    return (time.process_time() - start) / rounds


def main() -> None:
    """Print both times and their ratio."""
    torch.set_num_threads(1)
    network = SparseTransformer(NETWORK)
    plugin, monitor = PerBlockGradientScaling(), LossScaleMonitor(every_n_updates=10**9)
    plugin.convert_module(network)
    monitor._source = BlockScales(plugin)
    monitor.num_updates = 1
    network.device = torch.device("cpu")  # type: ignore[assignment]
    text, image = torch.ones(32, 12, dtype=torch.long), torch.zeros(32, 64, dtype=torch.long)

    def step() -> None:
        sum(logits.square().mean() for logits in network(text, image)).backward()

    def watch() -> None:
        nothing: Any = None
        monitor.on_train_batch_start(nothing, network, (text, image), 0)  # type: ignore[arg-type]
        monitor.on_before_optimizer_step(nothing, network, nothing)  # type: ignore[arg-type]
        monitor.on_train_batch_end(nothing, network, nothing, nothing, 0)  # type: ignore[arg-type]

    plugin.use_dtype("float32")
    step_seconds, watch_seconds = _seconds(step, 5), _seconds(watch, 2000)
    print(f"step {1e3 * step_seconds:.1f} ms, monitor {1e6 * watch_seconds:.0f} us: {watch_seconds / step_seconds:.3%}")


if __name__ == "__main__":
    main()
