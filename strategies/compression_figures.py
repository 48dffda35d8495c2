"""What a run logs about its compressed gradients."""

import re
from collections import defaultdict

from lightning_dalle.distributed.powersgd.sharded import ShardedGradients


def compression_figures(gradients: ShardedGradients) -> dict[str, float]:
    """Figures of this process by their logged names; none where nothing is compressed.

    `bytes_sent` and `bytes_saved` are payload to other machines since the start, `compression_rate` the share saved,
    `residual_norm` that of what this process has left out, `gradient_norm` that of the last synchronised gradient over
    all shards, `skipped_steps` the updates without a finite one. `reconstruction_error/GROUP` is the share of the norm
    that the shared basis misses, averaged over matrices of one role: names in which only numbers differ.
    """
    if not gradients.compressor.plan.matrices:
        return {}
    traffic = gradients.compressor.traffic
    figures = {
        "bytes_sent": float(traffic.sent),
        "bytes_saved": float(traffic.saved),
        "compression_rate": traffic.rate,
        "residual_norm": float(gradients.compressor.residuals.norm()),
        "gradient_norm": float(gradients.norm),
        "skipped_steps": float(gradients.skipped_steps),
    }
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for name, error in gradients.reconstruction_errors.items():
        groups[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(error)
    figures |= {f"reconstruction_error/{group}": sum(errors) / len(errors) for group, errors in groups.items()}
    return {f"powersgd/{name}": value for name, value in figures.items()}
