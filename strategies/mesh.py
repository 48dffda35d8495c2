"""One strategy over a device mesh: replicas, shards of parameters, and shards of sequences."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.context_parallel.collectives import validate_batches_agree
from lightning_dalle.distributed.context_parallel.hooks import align_generators, attach_plan
from lightning_dalle.distributed.context_parallel.plan import ContextParallelConfig
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.distributed.gradients import GradientSynchronizer, MeanGradients
from lightning_dalle.distributed.hsdp import (
    is_sharded,
    shard_blocks,
    shard_remainder,
    sync_module_states,
    validate_gradients_agree,
    validate_shards,
)
from lightning_dalle.distributed.mesh import MeshSizes, ProcessMesh
from lightning_dalle.distributed.powersgd.checkpoint import load_powersgd, save_powersgd
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.distributed.powersgd.plan import uncompressed_names
from lightning_dalle.distributed.watchdog import Heartbeat
from lightning_dalle.strategies.checkpoints import FileCheckpoints, GatheringLauncher, ShardedCheckpoints
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
    | checkpoints | one file if parameters are replicated, else a folder for any later mesh | `checkpoints` |

    All processes start with the parameters of rank 0, unless the module shards itself, which it does in
    `configure_model`, over `self.trainer.strategy.shard_mesh`; what it leaves is sharded then. Any other module is
    sharded block by block of its `ModuleList`s. Gradients are exchanged between the last backward pass of a step and
    everything that looks at them: `on_before_optimizer_step`, clipping. Under PowerSGD a gradient that is not finite on
    any process skips the step on all. CUDA runs the same code and was not tried.

    Args:
        shard_size: Number of processes that share one replica of the parameters, a multiple of the context-parallel
            degree; "auto" takes those of a machine, None replicates the parameters.
        powersgd: Compression of gradients between replicas; None averages them uncompressed.
        exclude: Names of parameters that PowerSGD does not compress, or shell-style patterns of names, beside vectors,
            embeddings and what the module's `uncompressed_parameters()` names.
        context_parallel: How sequences are sharded; None keeps them on one process.
        start_method: How devices beyond the first get their processes: "popen" runs the script again, the others are
            those of multiprocessing; "auto" forks in a notebook.
        process_group_backend: As for Lightning's strategies.
        timeout: Time after which a process no longer waits for another.

    Raises:
        ValueError: If a setting is out of range or has no effect, or replicated parameters are to be compressed.
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
                "powersgd keeps state that only checkpoints of shards hold, but shard_size is None; give shard_size=1 "
                "for replicas of one process"
            )
        if exclude and powersgd is None:
            raise ValueError(f"exclude ({', '.join(exclude)}) has no effect without powersgd; give both or neither")
        if start_method not in get_args(StartMethod):
            raise ValueError(f"start_method ({start_method!r}) must be one of {', '.join(get_args(StartMethod))}")
        self.shard_size = shard_size
        self.powersgd = powersgd
        self.exclude = tuple(exclude)
        self.context_parallel = context_parallel
        self.start_method = start_method
        self.gradients: GradientSynchronizer | None = None
        self.session: ContextParallelSession | None = None
        self.checkpoints = FileCheckpoints(self) if shard_size is None else ShardedCheckpoints(self)
        self._mesh: ProcessMesh | None = None
        self._is_sharded = False
        self._heartbeat: Heartbeat | None = None
        self._handles: list[RemovableHandle] = []
        self._validated_steps: set[str] = set()

    # Processes

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of one dimension, of the processes that share one replica of the parameters."""
        if self._mesh is None:
            raise RuntimeError("shard_mesh is made when processes have started; read it in configure_model or later")
        return self._mesh.shard_mesh

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
        """Chain the process group and lay out the mesh.

        Raises:
            ValueError: If the sizes do not divide the number of processes, or each other.
        """
        self._setup_distributed()
        # A second run of the same Trainer keeps the mesh that the module is sharded over.
        if self._mesh is None:
            degree = self._context_parallel_degree()
            settings = self.context_parallel
            ulysses_degree = 1 if settings is None else settings.ulysses_degree_of(degree)
            self._mesh = ProcessMesh.init(self._mesh_sizes(degree), ulysses_degree, self.root_device.type)
            self._device_mesh = self._mesh.device_mesh
        if self._heartbeat is None:
            store = distributed.distributed_c10d._get_default_store()
            self._heartbeat = Heartbeat(store, self.global_rank, self.world_size)
        self._module._device_mesh = self._device_mesh

    def _context_parallel_degree(self) -> int:
        if self.context_parallel is None:
            return 1
        degree = self.context_parallel.degree
        return self.num_processes if degree == "auto" else degree

    def _mesh_sizes(self, degree: int) -> MeshSizes:
        if self.shard_size is None:
            return MeshSizes(self.world_size, context=degree)
        shard_size = self.num_processes if self.shard_size == "auto" else self.shard_size
        return MeshSizes.sharded(self.world_size, shard_size, degree)

    # Setup

    def setup(self, trainer: Trainer) -> None:
        """Distribute the module, then do as the base class, which insists on `configure_model`.

        Raises:
            TypeError: If sequences are to be sharded and nobody says where.
            ValueError: If the module optimises by hand or shards itself otherwise, or if error feedback meets one scale
                for the whole loss.
        """
        assert self.accelerator is not None
        assert self.model is not None
        module, fits = self._module, trainer.state.fn == TrainerFn.FITTING
        if fits and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, under which {type(self).__name__} cannot "
                "tell when a step is complete; use automatic optimization, or strategy='ddp'"
            )
        session = self._make_session(module)
        # 1. Parameters.
        self.accelerator.setup(trainer)
        self._distribute(module)
        self._is_sharded = is_sharded(module)
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
        if not is_sharded(module):
            sync_module_states(module, self.root_device)
            if self.shard_mesh.size() > 1:
                shard_blocks(module, self.shard_mesh, RUN_METHODS)
            return
        if self.shard_size is None:
            raise ValueError(f"{type(module).__name__} shards its parameters, but shard_size is None; give shard_size")
        shard_remainder(module, RUN_METHODS)
        # Between runs FSDP2 may show gathered parameters, which only look unsharded; each step validates what trains.
        sharded = {name: part for name, part in module.named_parameters() if isinstance(part, DTensor)}
        validate_shards(sharded, self.shard_mesh)

    def _make_synchronizer(self, module: LightningModule) -> GradientSynchronizer:
        assert self._mesh is not None
        replicate_group, shard_group = self._mesh.replicate_group, self.shard_mesh.get_group()
        if self.powersgd is None:
            return MeanGradients(replicate_group)
        declared = module.uncompressed_parameters() if isinstance(module, NamesUncompressed) else ()
        excluded = uncompressed_names(module, [*self.exclude, *declared])
        plugin = self.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        gradients = PowerSGDGradients(
            self._trained_parameters(),
            replicate_group,
            shard_group,
            self.powersgd,
            excluded,
            keep_non_finite=scaler is not None or isinstance(plugin, SkipsUpdates),
        )
        if scaler is not None and gradients.has_error_feedback:
            raise ValueError(
                "precision (16-mixed) scales the whole loss, and error-feedback buffers would be in units of a scale "
                "that has changed since; use 'bf16-mixed', the plugin PerBlockGradientScaling, or error_feedback=False"
            )
        return gradients

    def _make_session(self, module: LightningModule) -> ContextParallelSession | None:
        if self.context_parallel is None:
            return None
        assert self._mesh is not None
        plan = self.context_parallel.plan
        if plan is None:
            if not isinstance(module, HasSequencePlan):
                raise TypeError(
                    f"{type(module).__name__} has no method sequence_plan, which says where its sequences are sharded; "
                    "write it, or give plan to the strategy"
                )
            plan = module.sequence_plan()
        return ContextParallelSession(plan, self._mesh.context_groups, self.context_parallel.layout)

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

        def synchronized_closure() -> Any:
            # Lightning accumulates outside of this, so that the closure holds the last backward pass of a step.
            gradients.begin_last_backward()
            result = closure()
            trained = self._trained_parameters()
            if trained and self.shard_mesh.size() > 1:
                validate_gradients_agree(trained, self.shard_mesh.get_group())
            gradients.synchronize(trained)
            return result

        result = super().optimizer_step(optimizer, synchronized_closure, model, **kwargs)
        gradients.release()
        return result

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return what the optimizers train now, in the module's order: callbacks may unfreeze and add parameters."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        in_optimizers = {id(parameter) for parameters in groups for parameter in parameters}
        trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if id(parameter) in in_optimizers and parameter.requires_grad
        }
        if self._is_sharded:
            validate_shards(trained, self.shard_mesh)
        return trained

    # Checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers from the checkpoint that `load_checkpoint` returns."""
        return self.checkpoints.restored_by_lightning

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state."""
        return self.checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state."""
        return self.checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file; or a folder of shards, with what PowerSGD keeps in a folder of its own."""
        path = Path(self.broadcast(filepath))
        self.checkpoints.save(checkpoint, path, storage_options)
        if isinstance(self.gradients, PowerSGDGradients):
            save_powersgd(self.gradients, path / POWERSGD_FOLDER)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any mesh has written; shards go into the module and its optimizers at once."""
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = self.checkpoints.load(self._module, path, weights_only)
        if isinstance(self.gradients, PowerSGDGradients) and (path / POWERSGD_FOLDER).is_dir():
            restarted = load_powersgd(self.gradients, path / POWERSGD_FOLDER)
            if restarted:
                rank_zero_warn(f"the warm Q of another sharding starts again: {', '.join(restarted)}")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the module's state from a checkpoint, unless `load_checkpoint` has done it."""
        self.checkpoints.kind.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the optimizers' states from a checkpoint, unless `load_checkpoint` has done it."""
        self.checkpoints.kind.load_optimizer_state_dict(self, checkpoint)

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
