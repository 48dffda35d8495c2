"""Calls of torch's own attention and dropout, redirected by its dispatcher to code that knows the whole sequence.

| call | seen by | what happens |
| --- | --- | --- |
| `scaled_dot_product_attention`, `dropout`, by whatever name, thread or recomputation | the operators | redirected |
| the same in functions given to `torch.compile`, which attend in graphs | its stance | run eagerly, redirected |
| the same within `torch.vmap`, which resolves operators itself | the function mode | refused |
| dropout of channels, alpha dropout | the operators | refused |
| one of torch's attention kernels, `flex_attention`, kernels of other packages | the function mode | refused |
| `nn.MultiheadAttention(need_weights=True)`, which attends by plain products | the function mode | refused |
| fused encoder layers for inference, which call no operator | `torch.backends.mha` | switched off |

A `TorchFunctionMode` alone would not do: it belongs to one thread, and `Tensor.backward` leaves it, so that it would
miss what checkpointing recomputes; what it refuses has run forward before. A `TorchDispatchMode` comes too late:
attention has been taken apart when it sees it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT = torch.ops.aten.dropout.default
_DROPOUT_IN_PLACE = torch.ops.aten.dropout_.default
_UNKEYED_DROPOUT = ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_REDIRECTED = ("scaled_dot_product_attention", "dropout", "dropout_")
# With autograd and without: tensors of inference mode have no key of autograd. Aliases such as "Autograd" are not
# looked up for operators that torch composes of others.
_KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")
_MULTI_HEAD = functional.multi_head_attention_forward.__name__
_WAY_OUT = (
    "call scaled_dot_product_attention instead, or, where it sees whole sequences, call it within "
    "sharded_sequences(None) or name its submodule in the plan's unsharded"
)


class RedirectionTarget(Protocol):
    """Target of the redirected calls."""

    @property
    def is_active(self) -> bool:
        """Whether sequences are sharded at the moment."""
        ...

    def is_whole(self, query: Tensor) -> bool:
        """Return whether attention from a query needs no other process."""
        ...

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attend to all positions of the sequence, or to those before."""
        ...

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """Return the factors of hidden states, which depend on their positions in the whole sequence."""
        ...


@contextmanager
def redirected(target: RedirectionTarget) -> Iterator[None]:
    """Redirect every call of `scaled_dot_product_attention` and `dropout` within to `target`.

    The operators get other kernels in torch's dispatcher, above autograd, so that it does not matter who holds which
    reference to the function. What cannot be redirected is refused. Code given to `torch.compile` runs eagerly.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _kernels(target):
        for key in _KEYS:
            library.impl(name, kernel, key)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"), _Refusals(target):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        library._destroy()


def _kernels(target: RedirectionTarget) -> Iterator[tuple[str, Callable[..., Tensor]]]:
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
        if target.is_whole(query):
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
        if not (train and 0 < p < 1):
            dropped: Tensor = _DROPOUT.decompose(input, p, train)
            return dropped
        return input * target.dropout_factors(input, p)

    def drop_in_place(input: Tensor, p: float, train: bool) -> Tensor:
        if not (train and 0 < p < 1):
            dropped: Tensor = _DROPOUT_IN_PLACE.decompose(input, p, train)
            return dropped
        return input.mul_(target.dropout_factors(input, p))

    yield from zip(_REDIRECTED, (attend, drop, drop_in_place), strict=True)
    for name in _UNKEYED_DROPOUT:
        yield name, _refusing_kernel(target, name)
        yield f"{name}_", _refusing_kernel(target, f"{name}_")


def _refusing_kernel(target: RedirectionTarget, name: str) -> Callable[[Tensor, float, bool], Tensor]:
    operator = getattr(torch.ops.aten, name).default

    def refuse(input: Tensor, p: float, train: bool) -> Tensor:
        if target.is_active and train and p > 0:
            raise ValueError(
                f"{name} (p={p}) is drawn for local positions alone; use dropout, whose masks depend on positions in "
                "the whole sequence"
            )
        dropped: Tensor = operator.decompose(input, p, train)
        return dropped

    return refuse


class _Refusals(TorchFunctionMode):
    """Refuses what would attend among local positions alone, below the operators that are redirected."""

    def __init__(self, target: RedirectionTarget) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_of_interest(func) and self._target.is_active:
            _refuse(_name(func), kwargs)
        return func(*args, **kwargs)


def _refuse(name: str, kwargs: dict[str, Any]) -> None:
    if name not in (*_REDIRECTED, _MULTI_HEAD):
        raise ValueError(f"{name} attends among local positions alone; {_WAY_OUT}")
    if name == _MULTI_HEAD and kwargs.get("need_weights", True):
        raise ValueError(
            "nn.MultiheadAttention with need_weights=True computes attention among local positions alone; call it "
            "with need_weights=False"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{name} of a sharded sequence was called within torch.vmap or another transform of torch.func, which "
            "resolves it among local positions alone; give it batched tensors instead"
        )


def _is_of_interest(func: Any) -> bool:
    """Return whether a function is redirected or attends, by its name: other packages' kernels share no more."""
    name = _name(func)
    attends = any(part in name for part in ("attention", "attn", "fmha")) and not name.endswith("backward")
    return attends or name in _REDIRECTED


def _name(func: Any) -> str:
    """Return the name of a function, or of an operator without its overload, which may end it in ".default"."""
    name = str(getattr(func, "__name__", func))
    return name.split(".")[0]
