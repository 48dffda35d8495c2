"""Parameters sharded inside a machine, low-rank gradients between machines (Ramesh et al. 2021, section 2.5)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dalle.distributed.powersgd.checkpoint import load_compressor, save_compressor
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.plan import uncompressed_names
from lightning_dalle.distributed.powersgd.sharded import ShardedGradients
from lightning_dalle.strategies.compression_figures import compression_figures
from lightning_dalle.strategies.protocols import NamesUncompressed, SkipsUpdates
from lightning_dalle.strategies.sharded_replicas import ShardedReplicasStrategy, StartMethod

COMPRESSOR_FOLDER = "powersgd"


class ShardedPowerSGDStrategy(ShardedReplicasStrategy):
    """FSDP2 over the devices of a machine, PowerSGD with error feedback between machines, for any LightningModule.

    A module that shards itself does so in `configure_model`, over `self.device_mesh["shard"]`; any other is sharded
    block by block of its `ModuleList`s. Machines exchange gradients once an optimizer step, whatever
    `accumulate_grad_batches` says, before `on_before_optimizer_step` and clipping see them. A gradient that is not
    finite on any process skips the update on all. With `shard_size=1` this is data parallelism with PowerSGD, in
    plain tensors; with one copy it is FSDP2.

    Not compressed: vectors, embeddings and what is tied to one, names in `exclude`, and what a module's
    `uncompressed_parameters()` names. Checkpoints are folders of shards that resume on any number of machines and
    shards; `consolidate_checkpoint` makes one file of them. What is logged every `log_every_n_steps`, as `powersgd/...`, is
    told in `compression_figures`. CUDA runs the same code and was not tried.

    Args:
        shard_size: Devices that share one copy of the parameters; "auto" takes those of a machine.
        rank: Of each device's matrices; 4 if `total_rank` does not say it either.
        total_rank: Of all shards of a matrix together; must be a multiple of the shard size.
        exclude: Names of parameters that are not compressed, or shell-style patterns.
        min_compression_rate: As all that follow up to `seed`, see `PowerSGDConfig`.
        start_method: As all that follow, see `ShardedReplicasStrategy`.

    Raises:
        ValueError: If both ranks are given, or a number is out of range.

    Example:
        >>> ShardedPowerSGDStrategy(shard_size=8, rank=112).config.rank
        112
    """

    def __init__(
        self,
        shard_size: int | Literal["auto"] = "auto",
        rank: int | None = None,
        total_rank: int | None = None,
        exclude: Sequence[str] = (),
        min_compression_rate: float = 0.5,
        minimum_elements: int = 0,
        error_feedback: bool = True,
        warm_start: bool = False,
        wire_format: str = "fp32",
        residual_format: str = "fp32",
        start_powersgd_iter: int = 0,
        overlap: bool = False,
        seed: int = 0,
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(shard_size, start_method, process_group_backend, timeout)
        if rank is not None and total_rank is not None:
            raise ValueError(f"rank ({rank}) and total_rank ({total_rank}) say the same thing twice; give one of them")
        self.total_rank = total_rank
        self.exclude = tuple(exclude)
        self.config = PowerSGDConfig(
            # A total is divided once the number of shards is known.
            rank=next(value for value in (rank, total_rank, PowerSGDConfig.rank) if value is not None),
            min_compression_rate=min_compression_rate,
            minimum_elements=minimum_elements,
            error_feedback=error_feedback,
            warm_start=warm_start,
            wire_format=wire_format,
            residual_format=residual_format,
            start_powersgd_iter=start_powersgd_iter,
            overlap=overlap,
            seed=seed,
        )
        self.gradients: ShardedGradients | None = None

    def setup(self, trainer: Trainer) -> None:
        """Refuse what cannot be right, then shard and make optimizers.

        Raises:
            ValueError: If the precision plugin scales the loss by one factor.
        """
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                "precision (16-mixed) scales the whole loss, and residuals would be in units of a scale that has "
                "changed since; use 'bf16-mixed' or the plugin PerBlockGradientScaling"
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Take charge of the gradients of what the optimizer trains."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        trained = {
            id(part) for optimizer in self.optimizers for group in optimizer.param_groups for part in group["params"]
        }
        parameters = {
            name: part for name, part in module.named_parameters() if id(part) in trained and part.requires_grad
        }
        declared = module.uncompressed_parameters() if isinstance(module, NamesUncompressed) else ()
        excluded = uncompressed_names(module, [*self.exclude, *declared])
        self.gradients = ShardedGradients(parameters, self.device_mesh, self._config_of_shards(), excluded)

    def setup_precision_plugin(self) -> None:
        """Clip by the norm that the factors give; torch's own fails where some parameters are not sharded."""
        super().setup_precision_plugin()
        if self.gradients is not None:
            gradients, plugin = self.gradients, self.precision_plugin
            plugin.clip_grad_by_norm = lambda optimizer, clip_val: gradients.clip_by_norm(clip_val)  # type: ignore[method-assign]
            plugin.clip_grad_by_value = lambda optimizer, clip_val: gradients.clip_by_value(clip_val)  # type: ignore[method-assign]

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Let the backward pass accumulate on the residual."""
        if self.gradients is not None:
            self.gradients.fold_residuals()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Exchange gradients between the closure's backward and everything that looks at them."""

        def synchronised_closure() -> Any:
            # Lightning accumulates outside of this, so that the closure holds an update's last backward.
            if self.gradients is not None:
                self.gradients.begin_last_backward()
            result = closure()
            self.synchronise()
            return result

        result = super().optimizer_step(optimizer, synchronised_closure, model, **kwargs)
        if self.gradients is not None:
            self.gradients.release()
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder: Lightning's own shards, and in a folder of its own what compression left out."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.gradients is not None:
            save_compressor(self.gradients, Path(self.broadcast(filepath)) / COMPRESSOR_FOLDER)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder, written on however many machines and shards."""
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = super().load_checkpoint(path, weights_only)
        if self.gradients is not None and (path / COMPRESSOR_FOLDER).is_dir():
            restarted = load_compressor(self.gradients, path / COMPRESSOR_FOLDER)
            if restarted:
                rank_zero_warn(f"warm factors of another sharding start again: {', '.join(restarted)}")
        return checkpoint

    def teardown(self) -> None:
        """Stop listening to gradients."""
        if self.gradients is not None:
            self.gradients.close()
        super().teardown()

    def synchronise(self) -> None:
        """Exchange the gradients of an update, and log figures of it."""
        assert self.gradients is not None
        self.gradients.synchronise(self.logs, keep_spoiled=isinstance(self.precision_plugin, SkipsUpdates))
        assert self.lightning_module is not None
        if self.logs:
            self.lightning_module.log_dict(compression_figures(self.gradients))

    def _config_of_shards(self) -> PowerSGDConfig:
        if self.total_rank is None:
            return self.config
        size = self.device_mesh["shard"].size()
        if self.total_rank % size:
            raise ValueError(
                f"total_rank ({self.total_rank}) must be a multiple of the shard size ({size}); change it, or give rank"
            )
        return replace(self.config, rank=self.total_rank // size)
