"""Logged metrics of the cost of context parallelism."""

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession


class ContextParallelMonitor(Callback):
    """Logs, whenever the Trainer logs, the time and bytes that sharded sequences cost.

    Under the prefix `context_parallel/`, of this process and per optimizer step since the last time:

    | metric | meaning |
    | --- | --- |
    | `computing_seconds` | forward and backward passes without waiting |
    | `waiting_seconds` | waiting for messages that had not arrived when they were needed |
    | `bytes_sent` | payload to other processes of the context group |
    | `overlap_ratio` | share of the communication seconds during which this process computed |
    | `imbalance` | how much longer than the group's mean its slowest process computed attention |

    Nothing is logged where sequences are not sharded. All processes must have the callback, since `imbalance` is
    gathered.

    Example:
        >>> trainer = Trainer(callbacks=[ContextParallelMonitor()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._before = CommunicationStatistics()
        self._steps_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        session = _session(trainer)
        if session is not None:
            self._begin(trainer, session)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics since the last time."""
        session = _session(trainer)
        if session is None or not trainer._logger_connector.should_update_logs:
            return
        since = session.communication - self._before
        steps = max(trainer.global_step - self._steps_before, 1)
        imbalance = attention_imbalance(since.attention_seconds, session.groups.context, pl_module.device)
        pl_module.log_dict(context_parallel_metrics(since, steps, imbalance))
        self._begin(trainer, session)

    def _begin(self, trainer: Trainer, session: ContextParallelSession) -> None:
        self._before = replace(session.communication)
        self._steps_before = trainer.global_step


def context_parallel_metrics(since: CommunicationStatistics, steps: int, imbalance: float) -> dict[str, float]:
    """Return the metrics of so many optimizer steps by their logged names."""
    metrics = {
        "computing_seconds": (since.step_seconds - since.waiting_seconds) / steps,
        "waiting_seconds": since.waiting_seconds / steps,
        "bytes_sent": since.bytes_sent / steps,
        "overlap_ratio": since.overlap_ratio,
        "imbalance": imbalance,
    }
    return {f"context_parallel/{name}": value for name, value in metrics.items()}


def attention_imbalance(seconds: float, group: ProcessGroup | None, device: torch.device | str) -> float:
    """Return by how much the group's slowest process exceeds its mean, as a share of the mean; all must call it."""
    if group is None:
        return 0.0
    local = torch.tensor([seconds], dtype=torch.float32, device=device)
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    distributed.all_gather(gathered, local, group=group)
    by_rank = torch.cat(gathered)
    return float(by_rank.max() / by_rank.mean().clamp(min=1e-12) - 1)


def _session(trainer: Trainer) -> ContextParallelSession | None:
    session = getattr(trainer.strategy, "session", None)
    return session if isinstance(session, ContextParallelSession) else None
