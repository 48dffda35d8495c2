"""Calls of torch's own functions that need to know of other processes' positions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class KnowsPositions(Protocol):
    """What the calls are redirected to."""

    @property
    def is_active(self) -> bool:
        """Whether they are at the moment."""
        ...

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attention to all positions, or those before."""
        ...

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """What hidden states are multiplied with."""
        ...


class RedirectedFunctions:
    """Replaces `scaled_dot_product_attention`, also that of `nn.MultiheadAttention`, and `dropout`, for a time.

    They are replaced under all names that modules have for them, which reaches what a backward pass computes again,
    in whatever thread. A torch function mode would not: it does not hold within `backward`.
    """

    def __init__(self, target: KnowsPositions) -> None:
        self._target = target
        self._attention = functional.scaled_dot_product_attention
        self._dropout = functional.dropout
        self._multi_head_attention = functional.multi_head_attention_forward
        replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            self._attention: self._attend,
            self._dropout: self._drop,
            self._multi_head_attention: self._attend_by_heads,
        }
        self._places = [
            (module, name, replacements[value])
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            for name, value in list(vars(module).items())
            if callable(value) and any(value is function for function in replacements)
        ]

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """The functions are replaced within."""
        before = [(module, name, vars(module)[name]) for module, name, _ in self._places]
        is_fast = torch.backends.mha.get_fastpath_enabled()
        # Fused layers for inference would not call the functions.
        torch.backends.mha.set_fastpath_enabled(False)
        for module, name, replacement in self._places:
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)
            torch.backends.mha.set_fastpath_enabled(is_fast)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self._target.is_active:
            whole: Tensor = self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return whole
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is of this process's positions and hides those of others wrongly; call attention with "
                "is_causal, and let the plan name documents, key_padding_mask or prefix_length"
            )
        if query.dim() != 4:
            raise ValueError(f"query has shape {tuple(query.shape)}; over a cut sequence it must have 4 dimensions")
        if scale is not None:
            query = query * (scale * query.shape[-1] ** 0.5)
        return self._target.attend_plainly(query, key, value, is_causal, dropout_p)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (self._target.is_active and training and 0 < p < 1):
            return self._dropout(input, p, training, inplace)
        factors = self._target.dropout_factors(input, p)
        return input.mul_(factors) if inplace else input * factors

    def _attend_by_heads(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("need_weights", True) and self._target.is_active:
            raise ValueError(
                "nn.MultiheadAttention with need_weights=True computes attention of this process's positions alone; "
                "call it with need_weights=False"
            )
        return self._multi_head_attention(*args, **kwargs)
