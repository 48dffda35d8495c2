"""Starts processes from a running one, as notebooks need it, for models whose parameters are sharded."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


class GatheringLauncher(_MultiProcessingLauncher):
    """Hands whole tensors back: the main process has no process group to read shards with."""

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        # The process ends with this call.
        module.state_dict = lambda *_, **__: whole  # type: ignore[assignment]
        return super()._collect_rank_zero_results(trainer, results)
