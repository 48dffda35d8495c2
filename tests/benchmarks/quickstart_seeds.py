"""Draws and judges anew from the checkpoints of a finished quickstart, by other seeds.

Example: `python -m tests.benchmarks.quickstart_seeds shapes runs/quickstart 1 2 3 4`
"""

import argparse
from pathlib import Path

from lightning_dalle.quickstart.open_moji_scores import judge_open_moji
from lightning_dalle.quickstart.pictures import Models
from lightning_dalle.quickstart.settings import RunFolder, Sampling, Settings
from lightning_dalle.quickstart.shapes_scores import judge_shapes
from lightning_dalle.quickstart.training import data_module


def main() -> None:
    """Print the figures of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["openmoji", "shapes"])
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("seeds", type=int, nargs="+")
    arguments = parser.parse_args()
    judge = {"openmoji": judge_open_moji, "shapes": judge_shapes}[arguments.data]
    data = data_module(Settings(data=arguments.data))
    models = Models.load(RunFolder(arguments.folder))
    for seed in arguments.seeds:
        figures = judge(models, data, Sampling(seed=seed).for_data(arguments.data)).figures
        print(seed, {figure.key: round(figure.value, 3) for figure in figures}, flush=True)


if __name__ == "__main__":
    main()
