"""Measures every figure, and keeps the tables with the machine in README.md beside this file.

On an idle machine: `make bench`.
"""

import argparse
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from tests.benchmarks.attention_tables import AttentionSizes, growth_table, layer_table
from tests.benchmarks.network_tables import PAPER_LIKE, decoding_table, step_table
from tests.benchmarks.table import Table

README = Path(__file__).with_name("README.md")
INTRODUCTION = """# Benchmarks

`make bench` measures these metrics and writes this file. In each table the ways of doing the same work were run in turn
in one process, after one round that does not count; times are medians. The dropped round and the turns leave a ratio
that a busy machine moves less than the times, yet an idle one is better.
"""


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    name = names[0] if names else platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}, fp32."


def tables() -> Iterator[Table]:
    yield layer_table(AttentionSizes())
    yield growth_table(AttentionSizes())
    yield step_table(PAPER_LIKE)
    yield decoding_table(PAPER_LIKE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    console = Console()
    console.print(machine())
    measured = []
    for table in tables():
        table.show(console)
        measured.append(table.markdown())
    README.write_text("\n\n".join((INTRODUCTION.rstrip(), f"Machine: {machine()}", *measured)) + "\n")


if __name__ == "__main__":
    main()
