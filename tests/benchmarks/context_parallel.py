"""Attention over a sharded sequence against one process: time, kept and peak memory, bytes, and another package.

    python -m tests.benchmarks.context_parallel

Every rank and the process that it is compared with compute in one thread, so that two ranks need two idle cores. Rank 0
attends alone and all ranks attend together in turn. The rows of `ring-attention-pytorch` appear where it is installed;
nothing of this package needs it.
"""

import argparse
import importlib.util

import torch
from rich.console import Console

from tests.benchmarks.context_contest import contest_table
from tests.benchmarks.context_memory import longest_table
from tests.benchmarks.context_sizes import Sizes
from tests.benchmarks.context_times import table_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=Sizes.length)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    sizes = Sizes(length=arguments.length, rounds=arguments.rounds)
    torch.set_num_threads(1)
    console = Console(width=200)
    for world_size in arguments.ranks:
        table_of(sizes, world_size).show(console)
    if importlib.util.find_spec("ring_attention_pytorch") is not None:
        contest_table(sizes, arguments.ranks[0]).show(console)
    longest_table(sizes, arguments.ranks).show(console)


if __name__ == "__main__":
    main()
