"""What a run logs about attention over sequences that are cut among processes."""

from dataclasses import replace

import torch
from torch import distributed

from lightning_dalle.distributed.context_parallel.session import ContextParallelSession


class ContextFigures:
    """Figures of the steps since the last time that they were asked for."""

    def __init__(self, sequences: ContextParallelSession, device: torch.device) -> None:
        self._sequences = sequences
        self._device = device
        self.step_seconds = 0.0
        self.num_updates = 0
        self._before = replace(sequences.traffic)

    def take(self) -> dict[str, float]:
        """Figures by their logged names, seconds and bytes per update; all processes of the group must ask.

        `computing_seconds` are those of forward and backward passes without `waiting_seconds`, for messages that had
        not arrived. `hidden_share` is that of the messages' time in which this process computed. `imbalance` says how
        much longer than the mean of the group its slowest process computed attention.
        """
        traffic = self._sequences.traffic - self._before
        updates = max(self.num_updates, 1)
        figures = {
            "computing_seconds": (self.step_seconds - traffic.waiting_seconds) / updates,
            "waiting_seconds": traffic.waiting_seconds / updates,
            "bytes_sent": traffic.sent_bytes / updates,
            "hidden_share": traffic.hidden_share,
            "imbalance": self._imbalance(traffic.computing_seconds),
        }
        self.step_seconds, self.num_updates = 0.0, 0
        self._before = replace(self._sequences.traffic)
        return {f"context/{name}": value for name, value in figures.items()}

    def _imbalance(self, seconds: float) -> float:
        group = self._sequences.groups.context
        if group is None:
            return 0.0
        own = torch.tensor([seconds], dtype=torch.float32, device=self._device)
        all_of_them = [torch.empty_like(own) for _ in range(group.size())]
        distributed.all_gather(all_of_them, own, group=group)
        joined = torch.cat(all_of_them)
        return float(joined.max() / joined.mean().clamp(min=1e-12) - 1)
