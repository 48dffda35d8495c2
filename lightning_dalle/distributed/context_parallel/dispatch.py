"""Calls of torch's own attention and dropout, redirected by torch's dispatcher to whoever knows the whole sequence."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT = torch.ops.aten.dropout.default
# With autograd and without: tensors of inference mode have no key of autograd.
_KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")


class KnowsPositions(Protocol):
    """Target of the redirected calls."""

    @property
    def is_active(self) -> bool:
        """Whether sequences are sharded at the moment."""
        ...

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attend to all positions of the sequence, or to those before."""
        ...

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """Return the factors of hidden states, which depend on their positions in the whole sequence."""
        ...


@contextmanager
def redirected(target: KnowsPositions) -> Iterator[None]:
    """Redirect every call of `scaled_dot_product_attention` and `dropout` within to `target`, while it is active.

    The two operators get other kernels in torch's dispatcher, above autograd. So it does not matter by which name, from
    which module, thread or recomputation they are called; what a module or `nn.MultiheadAttention` has imported before,
    or imports within, is redirected too. Fused layers for inference, which would not call them, are switched off, and
    `nn.MultiheadAttention(need_weights=True)`, which attends by plain products, is refused.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _kernels(target):
        for key in _KEYS:
            library.impl(name, kernel, key)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _RefusesWeights(target):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        library._destroy()


def _kernels(target: KnowsPositions) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not target.is_active:
            local: Tensor = _ATTENTION.decompose(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return local
        if attn_mask is not None:
            raise ValueError(
                "attn_mask has rows and columns of local positions alone, and masks those of other processes wrongly; "
                "call attention with is_causal, and let the plan name document_ids, key_padding_mask or prefix_length"
            )
        if query.dim() != 4:
            raise ValueError(f"query has shape {tuple(query.shape)}; of a sharded sequence it must have 4 dimensions")
        if scale is not None:
            query = query * (scale * query.shape[-1] ** 0.5)
        return target.attend_plainly(query, key, value, is_causal, dropout_p)

    def drop(input: Tensor, p: float, train: bool) -> Tensor:
        if not (target.is_active and train and 0 < p < 1):
            dropped: Tensor = _DROPOUT.decompose(input, p, train)
            return dropped
        return input * target.dropout_factors(input, p)

    def drop_in_place(input: Tensor, p: float, train: bool) -> Tensor:
        if train and p > 0:
            factors = (
                target.dropout_factors(input, p)
                if target.is_active and p < 1
                else drop(torch.ones_like(input), p, True)
            )
            input.mul_(factors)
        return input

    yield "scaled_dot_product_attention", attend
    yield "dropout", drop
    yield "dropout_", drop_in_place


class _RefusesWeights(TorchFunctionMode):
    """Refuses attention that returns its weights: they are those of local positions alone."""

    def __init__(self, target: KnowsPositions) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_multi_head = func is functional.multi_head_attention_forward
        if is_multi_head and kwargs.get("need_weights", True) and self._target.is_active:
            raise ValueError(
                "nn.MultiheadAttention with need_weights=True computes attention among local positions alone; call it "
                "with need_weights=False"
            )
        return func(*args, **kwargs)
