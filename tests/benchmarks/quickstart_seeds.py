"""Draws and evaluates anew from the checkpoints of a finished quickstart, by other seeds.

Example: `python -m tests.benchmarks.quickstart_seeds shapes runs/quickstart 1 2 3 4`
"""

import argparse
from pathlib import Path

from lightning_dalle.quickstart.picture_scores import evaluate_open_moji, evaluate_shapes
from lightning_dalle.quickstart.pictures import Models
from lightning_dalle.quickstart.settings import RunFolder, Sampling, Settings
from lightning_dalle.quickstart.training import data_module


def main() -> None:
    """Print the metrics of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["openmoji", "shapes"])
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("seeds", type=int, nargs="+")
    arguments = parser.parse_args()
    evaluate = {"openmoji": evaluate_open_moji, "shapes": evaluate_shapes}[arguments.data]
    data = data_module(Settings(data=arguments.data))
    models = Models.load(RunFolder(arguments.folder))
    for seed in arguments.seeds:
        metrics = evaluate(models, data, Sampling(seed=seed).for_data(arguments.data)).metrics
        print(seed, {metric.key: round(metric.value, 3) for metric in metrics}, flush=True)


if __name__ == "__main__":
    main()
