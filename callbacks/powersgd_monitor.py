"""Logged metrics of gradient compression by PowerSGD."""

import re
from collections import defaultdict
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients


class PowerSGDMonitor(Callback):
    """Logs, whenever the Trainer logs, how many bytes compression of gradients saved and what it missed.

    Under the prefix `powersgd/`, of this process:

    | metric | meaning |
    | --- | --- |
    | `bytes_sent`, `bytes_saved` | payload to other replicas since the start |
    | `compression_rate` | share of the bytes that was saved |
    | `error_feedback_norm` | norm of what this process has not sent yet |
    | `gradient_norm` | norm of the last synchronized gradient over all shards |
    | `skipped_steps` | steps without a finite gradient |
    | `reconstruction_error/ROLE` | share of a gradient's norm outside the span of P |

    The last is averaged over matrices of one role, whose names differ in numbers alone, as `blocks.*.fc1.weight`.
    Nothing is logged where nothing is compressed: with one replica, or under another strategy.

    Example:
        >>> trainer = Trainer(callbacks=[PowerSGDMonitor()], logger=False, enable_checkpointing=False)
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ask for reconstruction errors where they will be logged."""
        gradients = _gradients(trainer)
        if gradients is not None:
            gradients.measure = trainer._logger_connector.should_update_logs

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics of a step."""
        gradients = _gradients(trainer)
        if gradients is not None and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(powersgd_metrics(gradients))


def powersgd_metrics(gradients: PowerSGDGradients) -> dict[str, float]:
    """Return the metrics of this process by their logged names; none where nothing is compressed."""
    if not gradients.compressor.plan.matrices:
        return {}
    communication = gradients.compressor.communication
    metrics = {
        "bytes_sent": float(communication.bytes_sent),
        "bytes_saved": float(communication.bytes_saved),
        "compression_rate": communication.compression_rate,
        "error_feedback_norm": float(gradients.compressor.error_feedback.norm()),
        "gradient_norm": float(gradients.norm),
        "skipped_steps": float(gradients.skipped_steps),
    }
    errors_by_role: defaultdict[str, list[float]] = defaultdict(list)
    for name, error in gradients.reconstruction_errors.items():
        errors_by_role[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(error)
    for role, errors in errors_by_role.items():
        metrics[f"reconstruction_error/{role}"] = sum(errors) / len(errors)
    return {f"powersgd/{name}": value for name, value in metrics.items()}


def _gradients(trainer: Trainer) -> PowerSGDGradients | None:
    gradients = getattr(trainer.strategy, "gradients", None)
    return gradients if isinstance(gradients, PowerSGDGradients) else None
