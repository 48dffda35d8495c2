"""The steps of a module under a Trainer, on the parts of its sequences."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.context_parallel.batches import align_generators, check_batches_agree
from lightning_dalle.distributed.context_parallel.hooks import attach_plan
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.strategies.context_figures import ContextFigures
from lightning_dalle.strategies.whole_or_sharded import WholeOrShardedStrategy


class CutStepsStrategy(WholeOrShardedStrategy):
    """Runs each step while sequences are cut, and logs what that took.

    Attributes:
        sequences: How they are cut, once the subclass has called `cut_sequences`.
    """

    sequences: ContextParallelSession | None = None
    _figures: ContextFigures | None = None
    _handles: tuple[RemovableHandle, ...] = ()
    _checked_steps: frozenset[str] = frozenset()

    def cut_sequences(self, sequences: ContextParallelSession) -> None:
        """Cut from now on, to be called once the module is set up."""
        assert self.lightning_module is not None
        self._detach()
        self._handles = tuple(attach_plan(self.lightning_module, sequences))
        self.sequences = sequences
        self._figures = ContextFigures(sequences, self.root_device)
        if sequences.groups.context is not None:
            align_generators(sequences.groups.context, self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, on this process's part."""
        assert self.sequences is not None
        result = self._step("training_step", super().training_step, *args, **kwargs)
        self.sequences.check_mean_was_taken("training_step")
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, on this process's part."""
        return self._step("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, on this process's part."""
        return self._step("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, with whole predictions on each process of a context group."""
        assert self.sequences is not None
        predictions = self._step("predict_step", super().predict_step, *args, **kwargs)
        dim, sequences = self.sequences.plan.predictions, self.sequences
        if dim is None:
            return predictions
        return tree_map(lambda part: sequences.join(part, dim) if isinstance(part, Tensor) else part, predictions)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward; what it computes again is cut as before."""
        assert self.sequences is not None
        with self.sequences.active(), self._timed():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def synchronise(self) -> None:
        """Average gradients, and log figures."""
        super().synchronise()
        assert self._figures is not None
        assert self.lightning_module is not None
        self._figures.num_updates += 1
        if self.logs:
            self.lightning_module.log_dict(self._figures.take())

    def teardown(self) -> None:
        """Leave the module as it was."""
        self._detach()
        super().teardown()

    def _step(self, name: str, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.sequences is not None
        group = self.sequences.groups.context
        if group is not None and name not in self._checked_steps:
            self._checked_steps |= {name}
            check_batches_agree(batch, group, self.root_device)
        with self._timed(), self.sequences.step(batch) as own:
            return step(own, *args, **kwargs)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        assert self._figures is not None
        self._figures.step_seconds += time.perf_counter() - start

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
