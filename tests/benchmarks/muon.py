"""A step of `Muon` over one of `torch.optim.Muon` on the matrices of the emoji transformer's layers, in turn.

python -m tests.benchmarks.muon
"""

import argparse
from typing import Any

import torch
from torch import nn

from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.hardware import has_fast_bfloat16
from lightning_dalle.optim import Muon
from tests.benchmarks.timing import interleaved_medians


def _matrices() -> list[nn.Parameter]:
    config = SparseTransformerConfig(depth=4, num_heads=4, text_vocabulary_size=8, image_vocabulary_size=8)
    network = SparseTransformer(config)
    matrices = [parameter for parameter in network.layers.parameters() if parameter.ndim == 2]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    return matrices


def main() -> None:
    """Print the median times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kinds: dict[str, Any] = {"torch": torch.optim.Muon, "ours": Muon}
    medians = interleaved_medians({name: kind(_matrices()).step for name, kind in kinds.items()}, arguments.rounds)
    print(f"bfloat16 is {'fast' if has_fast_bfloat16('cpu') else 'slow'} here, {arguments.threads} threads")
    print({name: f"{1000 * seconds:.0f} ms" for name, seconds in medians.items()})
    print(f"torch's takes {medians['torch'] / medians['ours']:.1f} times as long")


if __name__ == "__main__":
    main()
