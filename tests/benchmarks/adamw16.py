"""Step time of AdamW16 over that of `torch.optim.AdamW(foreach=True)`, in turns on one thread, in processor time.

python -m tests.benchmarks.adamw16 --parameters 50000000
"""

import argparse
import statistics
import time

import torch
from torch import nn

from lightning_dalle.optim import AdamW16


def _seconds(optimizer: torch.optim.Optimizer) -> float:
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def main() -> None:
    """Print the median times, their ratio, and the bytes of the moments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.randn(arguments.parameters))
    parameter.grad = torch.randn(arguments.parameters) * 0.01
    optimizers = {"AdamW": torch.optim.AdamW([parameter], foreach=True), "AdamW16": AdamW16([parameter])}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(arguments.rounds + 1):
        for name, optimizer in optimizers.items():
            times[name].append(_seconds(optimizer))
    # The first round allocates the moments.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    moments = optimizers["AdamW16"].state[parameter]
    size = sum(moment.nbytes for name, moment in moments.items() if name != "step")
    print({name: f"{seconds:.3f} s" for name, seconds in medians.items()})
    print(f"ratio {medians['AdamW16'] / medians['AdamW']:.2f}, {size / arguments.parameters} bytes of moments each")


if __name__ == "__main__":
    main()
