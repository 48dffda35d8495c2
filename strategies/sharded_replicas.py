"""Copies of a model, each sharded over neighbouring processes: the ground that gradient exchange is built on."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lightning_dalle.distributed.checkpoint import load_file, load_module, load_optimizer
from lightning_dalle.distributed.hsdp import is_sharded, shard_blocks, share_first_weights
from lightning_dalle.distributed.watchdog import Heartbeat
from lightning_dalle.strategies.gathering_launcher import GatheringLauncher

StartMethod = Literal["auto", "popen", "fork", "forkserver", "spawn"]
RUN_METHODS = ("training_step", "validation_step", "test_step", "predict_step", "generate")


class ShardedReplicasStrategy(ModelParallelStrategy):
    """FSDP2 over `device_mesh["shard"]`, for any LightningModule; gradients do not cross `device_mesh["replicate"]`.

    All processes start with the first one's weights. Shards of one process are plain tensors, without FSDP2. A
    checkpoint is a folder for any later number of processes; the file of an ordinary one is read too.

    Args:
        shard_size: Processes that share one copy of the parameters; "auto" takes those of a machine.
        start_method: How devices beyond the first get their processes: "popen" runs the script again, the others are
            those of multiprocessing; "auto" forks in a notebook.
        timeout: After which a process gives up waiting for another.

    Raises:
        ValueError: If `shard_size` is below 1.
    """

    def __init__(
        self,
        shard_size: int | Literal["auto"],
        start_method: StartMethod,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if shard_size != "auto" and shard_size < 1:
            raise ValueError(f"shard_size ({shard_size}) must be at least 1, or 'auto' for the devices of a machine")
        self.shard_size = shard_size
        self.start_method = start_method
        self._heartbeat: Heartbeat | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each process gets a part of the batch of its own, shards of one copy too."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def logs(self) -> bool:
        """Whether figures of this update are logged."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer._logger_connector.should_update_logs

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        method = self.start_method
        if method == "auto":
            # As Lightning tells a notebook.
            method = "fork" if hasattr(sys, "ps1") else "popen"
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()
        else:
            self._launcher = GatheringLauncher(self, start_method=method)

    def setup_environment(self) -> None:
        """Join the process group and lay out the mesh.

        Raises:
            ValueError: If `shard_size` does not divide the number of processes.
        """
        self._setup_distributed()
        shard_size = self.num_processes if self.shard_size == "auto" else self.shard_size
        if self.world_size % shard_size:
            raise ValueError(
                f"shard_size ({shard_size}) must divide the number of processes ({self.world_size}); "
                "change it, or devices and num_nodes of the Trainer"
            )
        # A second run of the same Trainer keeps the mesh that the module is sharded over.
        if self._device_mesh is None:
            shape = (self.world_size // shard_size, shard_size)
            self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
        if self._heartbeat is None:
            store = distributed.distributed_c10d._get_default_store()
            self._heartbeat = Heartbeat(store, self.global_rank, self.world_size)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        """Shard what `configure_model` left whole, then do as the base class, which insists on that hook.

        Raises:
            ValueError: If the module optimises by hand.
        """
        assert self.accelerator is not None
        assert self.model is not None
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, under which {type(self).__name__} cannot "
                "tell when an update is complete; use automatic optimization, or strategy='ddp'"
            )
        self.accelerator.setup(trainer)
        self.distribute(module)
        _materialize_distributed_module(self.model, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def distribute(self, module: LightningModule) -> None:
        """Start from the same weights, and shard what the module left whole."""
        if is_sharded(module):
            return
        share_first_weights(module, self.root_device)
        if self.device_mesh["shard"].size() > 1:
            shard_blocks(module, self.device_mesh["shard"], RUN_METHODS)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read weights and optimizers into place, and hand out the rest."""
        path, module = Path(self.broadcast(checkpoint_path)), self.lightning_module
        assert module is not None
        if path.is_dir():
            load_module(module, path, "state_dict", module.strict_loading)
            for number, optimizer in enumerate(self.optimizers):
                load_optimizer(module, optimizer, path, f"optimizer_{number}")
            rest: dict[str, Any] = torch.load(path / "meta.pt", weights_only=weights_only)
            return rest
        return load_file(module, self.optimizers, path, module.strict_loading, weights_only)

    def on_exception(self, exception: BaseException) -> None:
        """Note in the error which rank is gone, since the others only see that a connection closed."""
        if self._heartbeat is None or self.world_size == 1:
            return
        if isinstance(exception, RuntimeError):
            # As failed collectives raise it.
            exception.add_note(self._heartbeat.explain(exception))
        else:
            self._heartbeat.report(exception)

    def teardown(self) -> None:
        """Stop what runs beside the training."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        super().teardown()
