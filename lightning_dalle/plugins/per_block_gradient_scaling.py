"""Mixed precision with one gradient scale per residual block (Ramesh et al. 2021, appendix D)."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import LBFGS

from lightning_dalle.ops.hardware import warn_if_slow
from lightning_dalle.plugins.block_hooks import BlockHooks
from lightning_dalle.plugins.gradient_blocks import Blocks, find_blocks
from lightning_dalle.plugins.gradient_scales import GradientScales, groups_finite_on_all_ranks

BlockDtype = Literal["float16", "bfloat16", "float32"]
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class PerBlockGradientScaling(Precision):
    """Runs the blocks of any LightningModule in 16 bits, each with a gradient scale of its own, and the rest in 32.

    The gradient that enters a block is multiplied by its scale and the one that leaves is divided by it, so what blocks
    hand to each other on the identity path, and every parameter's gradient, is unscaled and in 32 bits: hooks, logging,
    clipping, accumulation and all-reduces see what they would see in float32. DistributedDataParallel divides by the
    number of replicas before it sums. Gains, biases of linear and convolutional layers, and whatever is no block
    (embeddings, heads, loss) compute in 32 bits.

    An update is skipped, on all ranks, where any gradient of the optimizer is not finite. The scales of the blocks then
    move as in the paper, see `GradientScales`, whose constants these are. Give the plugin to a Trainer as
    `Trainer(plugins=PerBlockGradientScaling(...))`.

    Checkpointed activations work around a block and, with `use_reentrant=False`, inside it. Sharded modules must hold
    whole blocks, with parameters in float32. On a CPU that multiplies the dtype slowly a run begins with a warning.

    Args:
        blocks: A regular expression that the whole name of a submodule matches, or a class of submodules, or several;
            None asks the LightningModule's `gradient_blocks()`, see `HasGradientBlocks`.
        dtype: Dtype of the blocks' bodies. float32 is for comparison.
        num_replicas: Multiplies the three scales; None is the number of data-parallel replicas of the run.

    Attributes:
        num_updates: Updates so far, skipped ones included.
        num_skipped_updates: Updates that were skipped.
        update_is_skipped: Update is skipped of the current or last update; known before `on_before_optimizer_step`.

    Raises:
        ValueError: If the dtype is unknown or a constant is out of range.
    """

    def __init__(
        self,
        blocks: str | type[nn.Module] | Sequence[type[nn.Module]] | None = None,
        dtype: BlockDtype = "float16",
        *,
        initial_scale: float = 2.0**13,
        growth_factor: float = 2.0 ** (1 / 1000),
        backoff_factor: float = math.sqrt(2),
        backoff_interval: int = 125,
        min_scale: float = 2.0**7,
        max_scale: float = 2.0**24,
        num_replicas: int | None = None,
    ) -> None:
        self.block_selection = blocks
        self.num_replicas = num_replicas
        self.use_dtype(dtype)
        self._constants: dict[str, Any] = {
            "initial_scale": initial_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "backoff_interval": backoff_interval,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        # Refuses wrong constants before a run begins.
        self.scales = GradientScales((), num_replicas=num_replicas or 1, **self._constants)
        self.blocks: Blocks = {}
        self.num_updates = self.num_skipped_updates = 0
        self.update_is_skipped = False
        self._hooks: list[BlockHooks] = []

    def use_dtype(self, dtype: BlockDtype) -> None:
        """Change the type of the blocks' bodies, from the next forward pass on.

        Raises:
            ValueError: If it is unknown.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype ({dtype!r}) must be one of {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[dtype]
        names = {"float16": "16-mixed", "bfloat16": "bf16-mixed", "float32": "32-true"}
        self.precision = names[dtype]  # type: ignore[assignment]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Find the blocks and attach to them; scales go on where the blocks are those of an earlier run.

        Raises:
            ValueError: Under DeepSpeed, whose engine casts parameters, scales the loss and steps by itself.
        """
        if isinstance(_strategy(module), DeepSpeedStrategy):
            raise ValueError(
                "PerBlockGradientScaling cannot scale gradients that DeepSpeed's engine computes and steps with; use "
                "strategy='ddp' or 'sharded_powersgd', or precision='bf16-mixed' instead of the plugin"
            )
        warn_if_slow(self.dtype, _device(module))
        self.teardown()
        self.blocks = find_blocks(module, self.block_selection)
        if list(self.scales.scales) != list(self.blocks):
            replicas = self.num_replicas or _num_replicas(module)
            self.scales = GradientScales(list(self.blocks), num_replicas=replicas, **self._constants)
        for name, parts in self.blocks.items():
            self._hooks.append(BlockHooks(parts, self._scale_of(name), lambda: self.dtype))
        return module

    def teardown(self) -> None:
        """Leave the module as it was."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []

    def loss_scales(self) -> dict[str, float]:
        """Scale of each block."""
        return dict(self.scales.scales)

    def scale_changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how often the scale of each block grew and was divided."""
        return dict(self.scales.num_growths), dict(self.scales.num_divisions)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, decide with all ranks, let hooks and clipping see the gradients, and step or skip.

        Raises:
            TypeError: If the optimizer calls the closure by itself, as LBFGS does.
        """
        if isinstance(optimizer, LBFGS):
            raise TypeError("LBFGS evaluates the closure many times a step, which no gradient scale can follow")
        result = closure()
        # A training step that returned None made no gradients.
        is_empty = result is None and model.automatic_optimization
        if not is_empty:
            finite, others_finite = self._look_at_gradients(optimizer, model.device)
            self.update_is_skipped = not (others_finite and all(finite.values()))
        self._after_closure(model, optimizer)
        if is_empty:
            return result
        # Not before the hooks, which may want to see the scales that made these gradients.
        self.scales.update(finite)
        self.num_updates += 1
        if self.update_is_skipped:
            self.num_skipped_updates += 1
            return result
        return optimizer.step(**kwargs)

    def _look_at_gradients(self, optimizer: Optimizable, device: torch.device) -> tuple[dict[str, bool], bool]:
        """Return whether gradients are finite, of each block with parameters in the optimizer, and of all others."""
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        within = {name: dict.fromkeys(_parameters(parts)) for name, parts in self.blocks.items()}
        in_blocks = {parameter for parameters in within.values() for parameter in parameters}
        groups = [[parameter for parameter in optimized if parameter not in in_blocks]]
        names = []
        optimized_set = set(optimized)
        for name, parameters in within.items():
            if not optimized_set.isdisjoint(parameters):
                names.append(name)
                groups.append([parameter for parameter in parameters if parameter in optimized_set])
        gradients = [[item.grad for item in group if item.grad is not None] for group in groups]
        others, *finite = groups_finite_on_all_ranks(gradients, device)
        return dict(zip(names, finite, strict=True)), others

    def state_dict(self) -> dict[str, Any]:
        """Scales, their history and the numbers of updates."""
        return {
            **self.scales.state_dict(),
            "num_updates": self.num_updates,
            "num_skipped_updates": self.num_skipped_updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the run that wrote the checkpoint."""
        self.scales.load_state_dict(state_dict)
        self.num_updates = state_dict["num_updates"]
        self.num_skipped_updates = state_dict["num_skipped_updates"]

    def _scale_of(self, name: str) -> Callable[[], float]:
        # Through self, since the scales are replaced when a run begins.
        return lambda: self.scales.scales[name]


def _parameters(parts: tuple[nn.Module, ...]) -> Iterator[Tensor]:
    return (parameter for part in parts for parameter in part.parameters())


def _strategy(module: nn.Module) -> Any:
    """Return the plugin of the module's Trainer, or None."""
    return getattr(getattr(module, "_trainer", None), "strategy", None)


def _device(module: nn.Module) -> torch.device:
    """Where the module will run: its Trainer moves it there only after the plugin has seen it."""
    first = next(module.parameters(), torch.empty(0))
    return getattr(_strategy(module), "root_device", first.device)


def _num_replicas(module: nn.Module) -> int:
    """Return how many replicas see data of their own; 1 without a Trainer."""
    return (getattr(_strategy(module), "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)
