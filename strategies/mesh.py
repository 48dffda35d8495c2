"""One strategy over a device mesh: replicas, shards of parameters, and shards of sequences."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.checkpoint import load_file, load_module, load_optimizer
from lightning_dalle.distributed.context_parallel.collectives import validate_batches_agree
from lightning_dalle.distributed.context_parallel.comm import ContextGroups, init_context_groups
from lightning_dalle.distributed.context_parallel.hooks import align_generators, attach_plan
from lightning_dalle.distributed.context_parallel.plan import ContextParallelConfig
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.distributed.gradients import GradientSynchronizer, MeanGradients
from lightning_dalle.distributed.hsdp import is_sharded, shard_blocks, sync_module_states, validate_shards
from lightning_dalle.distributed.powersgd.checkpoint import load_powersgd, save_powersgd
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.distributed.powersgd.plan import uncompressed_names
from lightning_dalle.distributed.watchdog import Heartbeat
from lightning_dalle.strategies.checkpoints import GatheringLauncher
from lightning_dalle.strategies.protocols import HasSequencePlan, NamesUncompressed, SkipsUpdates

StartMethod = Literal["auto", "popen", "fork", "forkserver", "spawn"]
RUN_METHODS = ("training_step", "validation_step", "test_step", "predict_step", "generate")
POWERSGD_FOLDER = "powersgd"


class MeshStrategy(ModelParallelStrategy):
    """Trains any LightningModule over a device mesh with the axes `replicate`, `shard` and `context`.

    | part | what it does | held as |
    | --- | --- | --- |
    | parameters | replicated (DDP), sharded (FSDP2) or hybrid sharded (HSDP) | `shard_mesh` |
    | gradients | averaged over replicas once a step, by plain means or by PowerSGD | `gradients` |
    | sequences | sharded over the axis `context`, with exact attention | `session`, None if they are not |
    | checkpoints | one file if parameters are not sharded, else a folder for any later mesh | |

    All processes start with the parameters of rank 0. A module that shards itself does so in `configure_model`, over
    `self.trainer.strategy.shard_mesh`; any other is sharded block by block of its `ModuleList`s. Gradients are exchanged
    between the last backward pass of a step and everything that looks at them: `on_before_optimizer_step`, clipping.
    Under PowerSGD a gradient that is not finite on any process skips the step on all. CUDA runs the same code and was
    not tried.

    Args:
        shard_size: Number of processes that share one replica of the parameters, a multiple of the context-parallel
            degree; "auto" takes those of a machine, None replicates the parameters.
        powersgd: Compression of gradients between replicas; None averages them uncompressed.
        exclude: Names of parameters that PowerSGD does not compress, or shell-style patterns of names, beside vectors,
            embeddings and what the module's `uncompressed_parameters()` names.
        context_parallel: How sequences are sharded; None leaves them whole.
        start_method: How devices beyond the first get their processes: "popen" runs the script again, the others are
            those of multiprocessing; "auto" forks in a notebook.
        process_group_backend: As for Lightning's strategies.
        timeout: Time after which a process gives up waiting for another.

    Raises:
        ValueError: If a size is out of range, or replicated parameters are to be compressed.
    """

    def __init__(
        self,
        shard_size: int | Literal["auto"] | None = None,
        powersgd: PowerSGDConfig | None = None,
        exclude: Sequence[str] = (),
        context_parallel: ContextParallelConfig | None = None,
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if isinstance(shard_size, int) and shard_size < 1:
            raise ValueError(f"shard_size ({shard_size}) must be at least 1, or 'auto' for the devices of a machine")
        if shard_size is None and powersgd is not None:
            raise ValueError(
                "powersgd keeps state that only checkpoints of shards hold, but shard_size is None; give shard_size=1 for "
                "replicas of one process"
            )
        self.shard_size = shard_size
        self.powersgd = powersgd
        self.exclude = tuple(exclude)
        self.context_parallel = context_parallel
        self.start_method = start_method
        self.gradients: GradientSynchronizer | None = None
        self.session: ContextParallelSession | None = None
        # A checkpoint of replicated parameters is the file of an ordinary strategy.
        self._saved_as: type[ParallelStrategy] = ParallelStrategy if shard_size is None else ModelParallelStrategy
        self._shard_mesh: DeviceMesh | None = None
        self._context_groups: ContextGroups | None = None
        self._heartbeat: Heartbeat | None = None
        self._handles: list[RemovableHandle] = []
        self._validated_steps: set[str] = set()

    # Processes

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of one dimension, of the processes that share one replica of the parameters."""
        if self._shard_mesh is None:
            raise RuntimeError("shard_mesh is made when processes have started; read it in configure_model or later")
        return self._shard_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are divided among all processes but those that share a sequence."""
        degree = self._context_parallel_degree()
        return {"num_replicas": self.world_size // degree, "rank": self.global_rank // degree}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        method = self.start_method
        if method == "auto":
            # As Lightning recognises a notebook.
            method = "fork" if hasattr(sys, "ps1") else "popen"
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()
        else:
            self._launcher = GatheringLauncher(self, start_method=method)

    def setup_environment(self) -> None:
        """Join the process group and lay out the mesh.

        Raises:
            ValueError: If the sizes do not divide the number of processes, or each other.
        """
        self._setup_distributed()
        degree = self._context_parallel_degree()
        processes = self._processes_of_a_replica(degree)
        # A second run of the same Trainer keeps the mesh that the module is sharded over.
        if self._device_mesh is None:
            device, world = self.root_device.type, self.world_size
            shape = (world // max(processes, degree), max(processes // degree, 1), degree)
            self._device_mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "context"))
            by_replica = init_device_mesh(
                device, (world // processes, processes), mesh_dim_names=("replicate", "shard")
            )
            self._shard_mesh = by_replica["shard"]
            self._replicate_group = by_replica["replicate"].get_group()
            if self.context_parallel is not None:
                ulysses_degree = self.context_parallel.ulysses_degree_of(degree)
                self._context_groups = init_context_groups(world, degree, ulysses_degree, device)
        if self._heartbeat is None:
            store = distributed.distributed_c10d._get_default_store()
            self._heartbeat = Heartbeat(store, self.global_rank, self.world_size)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _context_parallel_degree(self) -> int:
        if self.context_parallel is None:
            return 1
        degree = self.context_parallel.degree
        return self.num_processes if degree == "auto" else degree

    def _processes_of_a_replica(self, degree: int) -> int:
        """Return how many processes share the parameters, after checking that all sizes fit."""
        world, advice = self.world_size, "change it, or devices and num_nodes of the Trainer"
        if world % degree:
            raise ValueError(
                f"context_parallel_degree ({degree}) must divide the number of processes ({world}); {advice}"
            )
        if self.shard_size is None:
            return 1
        processes = self.num_processes if self.shard_size == "auto" else self.shard_size
        if world % processes:
            raise ValueError(f"shard_size ({processes}) must divide the number of processes ({world}); {advice}")
        if processes % degree:
            raise ValueError(
                f"shard_size ({processes}) must be a multiple of context_parallel_degree ({degree}), whose processes "
                "share parameters too; change one of them, or leave shard_size out"
            )
        return processes

    # Setup

    def setup(self, trainer: Trainer) -> None:
        """Distribute the module, then do as the base class, which insists on `configure_model`.

        Raises:
            TypeError: If sequences are to be sharded and nobody says where.
            ValueError: If the module optimises by hand, or PowerSGD meets one scale for the whole loss.
        """
        assert self.accelerator is not None
        assert self.model is not None
        module, fits = self._module, trainer.state.fn == TrainerFn.FITTING
        if fits and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, under which {type(self).__name__} cannot "
                "tell when an update is complete; use automatic optimization, or strategy='ddp'"
            )
        if self._scaler is not None and self.powersgd is not None and self.powersgd.error_feedback:
            raise ValueError(
                "precision (16-mixed) scales the whole loss, and error-feedback buffers would be in units of a scale "
                "that has changed since; use 'bf16-mixed', the plugin PerBlockGradientScaling, or error_feedback=False"
            )
        session = self._make_session(module)
        # 1. Parameters.
        self.accelerator.setup(trainer)
        self._distribute(module)
        _materialize_distributed_module(self.model, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.barrier()
        # 2. Optimizers, and gradients of what they train.
        if fits:
            self.setup_optimizers(trainer)
            self.gradients = self._make_synchronizer(module)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)
        # 3. Sequences.
        self._attach(module, session)

    def _distribute(self, module: LightningModule) -> None:
        if is_sharded(module):
            if self.shard_size is None:
                raise ValueError(
                    f"{type(module).__name__} shards its parameters, but shard_size is None; give shard_size"
                )
            validate_shards(module, self.shard_mesh)
            return
        sync_module_states(module, self.root_device)
        if self.shard_mesh.size() > 1:
            shard_blocks(module, self.shard_mesh, RUN_METHODS)

    def _make_synchronizer(self, module: LightningModule) -> GradientSynchronizer:
        shard_group = self.shard_mesh.get_group()
        if self.powersgd is None:
            return MeanGradients(self._replicate_group, shard_group)
        declared = module.uncompressed_parameters() if isinstance(module, NamesUncompressed) else ()
        excluded = uncompressed_names(module, [*self.exclude, *declared])
        trained = self._trained_parameters()
        return PowerSGDGradients(trained, self._replicate_group, shard_group, self.powersgd, excluded)

    def _make_session(self, module: LightningModule) -> ContextParallelSession | None:
        if self.context_parallel is None:
            return None
        assert self._context_groups is not None
        plan = self.context_parallel.plan
        if plan is None:
            if not isinstance(module, HasSequencePlan):
                raise TypeError(
                    f"{type(module).__name__} has no method sequence_plan, which says where its sequences are sharded; "
                    "write it, or give plan to the strategy"
                )
            plan = module.sequence_plan()
        return ContextParallelSession(plan, self._context_groups, self.context_parallel.layout)

    def _attach(self, module: LightningModule, session: ContextParallelSession | None) -> None:
        self._detach()
        self.session = session
        if session is not None:
            self._handles = attach_plan(module, session)
            if session.groups.context is not None:
                align_generators(session.groups.context, self.root_device)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Steps

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward, on the local shard of the batch's sequences."""
        result = self._step("training_step", super().training_step, batch, *args, **kwargs)
        if self.session is not None:
            self.session.validate_mean_was_taken("training_step")
        return result

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward, on the local shard of the batch's sequences."""
        return self._step("validation_step", super().validation_step, batch, *args, **kwargs)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward, on the local shard of the batch's sequences."""
        return self._step("test_step", super().test_step, batch, *args, **kwargs)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward, with predictions gathered on each process of a context group where the plan says so."""
        predictions = self._step("predict_step", super().predict_step, batch, *args, **kwargs)
        return predictions if self.session is None else self.session.gather_predictions(predictions)

    def _step(self, name: str, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            return step(batch, *args, **kwargs)
        group = self.session.groups.context
        if group is not None and name not in self._validated_steps:
            self._validated_steps.add(name)
            validate_batches_agree(batch, group, self.root_device)
        with self.session.step(batch) as local:
            return step(local, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Let the synchronizer prepare the gradients that the backward pass adds to."""
        if self.gradients is not None:
            self.gradients.begin_backward()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward; what it recomputes is sharded as the forward pass was."""
        with nullcontext() if self.session is None else self.session.active():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Exchange gradients between the last backward pass and everything that looks at them."""
        assert self.gradients is not None
        gradients = self.gradients
        keep_non_finite = self._scaler is not None or isinstance(self.precision_plugin, SkipsUpdates)

        def synchronized_closure() -> Any:
            # Lightning accumulates outside of this, so that the closure holds the last backward pass of a step.
            gradients.begin_last_backward()
            result = closure()
            gradients.synchronize(self._trained_parameters(), keep_non_finite)
            return result

        with self._clipping_by_synchronizer():
            result = super().optimizer_step(optimizer, synchronized_closure, model, **kwargs)
        gradients.release()
        return result

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return what the optimizers train now, in the module's order: callbacks may unfreeze and add parameters."""
        in_optimizers = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if id(parameter) in in_optimizers and parameter.requires_grad
        }

    @contextmanager
    def _clipping_by_synchronizer(self) -> Iterator[None]:
        """Clip by the norm over all shards within: torch's function fails where only some parameters are sharded.

        A precision plugin that clips by a method of its own keeps it, as do replicated parameters under plain means.
        """
        plugin, gradients = self.precision_plugin, self.gradients
        is_plain = self.shard_size is None
        has_own = type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm
        if gradients is None or is_plain or has_own:
            yield
            return
        clipping = {
            "clip_grad_by_norm": lambda _, max_norm: gradients.clip_by_norm(max_norm),
            "clip_grad_by_value": lambda _, largest: gradients.clip_by_value(largest),
        }
        vars(plugin).update(clipping)
        try:
            yield
        finally:
            for name in clipping:
                del vars(plugin)[name]

    # Checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers from the checkpoint that `load_checkpoint` returns."""
        return self.shard_size is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, sharded or not."""
        return self._saved_as.lightning_module_state_dict(self)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, sharded or not."""
        return self._saved_as.optimizer_state(self, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file; or a folder of shards, with what PowerSGD keeps in a folder of its own."""
        self._saved_as.save_checkpoint(self, checkpoint, filepath, storage_options)
        if isinstance(self.gradients, PowerSGDGradients):
            save_powersgd(self.gradients, Path(self.broadcast(filepath)) / POWERSGD_FOLDER)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any mesh has written; shards go into the module and its optimizers at once."""
        path, module = Path(self.broadcast(checkpoint_path)), self._module
        if self.shard_size is None:
            return ParallelStrategy.load_checkpoint(self, path, weights_only)
        if not path.is_dir():
            return load_file(module, self.optimizers, path, module.strict_loading, weights_only)
        load_module(module, path, "state_dict", module.strict_loading)
        for number, optimizer in enumerate(self.optimizers):
            load_optimizer(module, optimizer, path, f"optimizer_{number}")
        checkpoint: dict[str, Any] = torch.load(path / "meta.pt", weights_only=weights_only)
        if isinstance(self.gradients, PowerSGDGradients) and (path / POWERSGD_FOLDER).is_dir():
            restarted = load_powersgd(self.gradients, path / POWERSGD_FOLDER)
            if restarted:
                rank_zero_warn(f"the warm Q of another sharding starts again: {', '.join(restarted)}")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the module's state from a file; that of a folder is loaded already."""
        self._saved_as.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the optimizers' states from a file; those of a folder are loaded already."""
        self._saved_as.load_optimizer_state_dict(self, checkpoint)

    # Ends

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
        """Leave the module as it was, and stop what runs beside the training."""
        self._detach()
        if self.gradients is not None:
            self.gradients.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _scaler(self) -> Any:
        """GradScaler of the precision plugin, if it has one."""
        plugin = self.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision) else None
